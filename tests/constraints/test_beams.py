"""Tests the constraints of beams: each has the state of its parent plus one token, and errors are kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from llm_serving.constraints.beams import BeamConstraint
from llm_serving.constraints.forced import ForcedTokens

VOCABULARY = 64


def allowed(constraint: Any) -> list[int]:
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def test_beams_of_one_parent_have_states_of_their_own() -> None:
    class Pairs(ForcedTokens):
        """Allows tokens 1 and 2, then ten times the first token."""

        def fork(self) -> Any:
            return Pairs(list(self._token_ids), VOCABULARY)

        def advance(self, token_id: int) -> None:
            self._token_ids = [*self._token_ids, token_id]

        def mask(self) -> Any:
            mask = np.zeros(self.num_words, np.uint32)
            for token in [10 * one for one in self._token_ids] or [1, 2]:
                mask[token // 32] |= np.uint32(1 << token % 32)
            return mask

    root = BeamConstraint(Pairs([], VOCABULARY))
    assert allowed(root) == [1, 2]
    first, second = root.extended(1), root.extended(2)
    assert (allowed(second), allowed(first), allowed(root)) == ([20], [10], [1, 2])
    assert allowed(first) == [10], "a lost agent asks again"
    assert allowed(second.extended(3)) == [20, 30]
    root.advance(1)
    assert allowed(root) == [1, 2]


def test_an_error_allows_every_token_and_stays() -> None:
    beam = BeamConstraint(ForcedTokens([5, 6], VOCABULARY)).extended(9)
    for _ in range(2):
        assert allowed(beam) == list(range(VOCABULARY))
        assert "token 9 was sampled" in beam.error


def test_a_constraint_that_has_failed_or_cannot_be_copied_is_an_error() -> None:
    class Fails(ForcedTokens):
        has_failed = True

        def fork(self) -> Any:
            return None

    root = BeamConstraint(Fails([5], VOCABULARY))
    assert len(allowed(root)) == VOCABULARY
    assert "no token may follow" in root.error
    child = root.extended(5)
    assert len(allowed(child)) == VOCABULARY
    assert "cannot be copied" in child.error
