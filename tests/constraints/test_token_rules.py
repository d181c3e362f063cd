"""Tests rules about tokens: allowed tokens, forbidden sequences and a minimum length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from llm_serving.constraints.token_rules import TokenRules
from llm_serving.request import Constraint, ConstraintError

VOCAB = 70


def allowed_ids(constraint: Constraint) -> set[int]:
    return {int(one) for one in np.unpackbits(constraint.mask().view(np.uint8), bitorder="little").nonzero()[0]}


class Only:
    """A constraint that allows a fixed set of tokens."""

    num_words = 3

    def __init__(self, *ids: int) -> None:
        self.tokens: list[int] = []
        self._mask = np.zeros(3, np.uint32)
        for one in ids:
            self._mask[one // 32] |= np.uint32(1 << one % 32)

    def advance(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def mask(self) -> npt.NDArray[np.uint32]:
        return self._mask


def test_without_rules_every_token_of_the_vocabulary_is_allowed() -> None:
    assert allowed_ids(TokenRules(VOCAB).start(None)) == set(range(VOCAB))


def test_end_tokens_are_allowed_after_the_minimum() -> None:
    constraint = TokenRules(VOCAB, allowed=[2, 5, 69], min_tokens=2, end_token_ids=[2, 1000, -1]).start(None)
    for _ in range(2):
        assert allowed_ids(constraint) == {5, 69}
        constraint.advance(5)
    assert allowed_ids(constraint) == {2, 5, 69}


def test_the_last_token_of_a_forbidden_sequence_is_not_allowed_after_the_others() -> None:
    rules = TokenRules(VOCAB, allowed=[1, 2, 3, 4], forbidden=[[4], [1, 2], [1, 1, 3], [2, 1, 3]])
    constraint = rules.start(None)
    masks = []
    for token in (1, 1, 1, 3, 2, 1, 1):  # a mask only restricts the next token, so a test may feed a forbidden one
        masks.append(allowed_ids(constraint))
        constraint.advance(token)
    assert masks == [{1, 2, 3}, {1, 3}, {1}, {1}, {1, 2, 3}, {1, 2, 3}, {1}]


def test_two_sequences_share_no_state() -> None:
    rules = TokenRules(VOCAB, forbidden=[[1, 2]])
    first, second = rules.start(None), rules.start(None)
    first.advance(1)
    assert (2 in allowed_ids(first), 2 in allowed_ids(second)) == (False, True)


def test_an_inner_constraint_gets_all_tokens_and_restricts_further() -> None:
    inner = Only(5, 6, 69)
    constraint = TokenRules(VOCAB, allowed=[5, 7, 69], forbidden=[[5, 5]]).start(inner)
    assert allowed_ids(constraint) == {5, 69}
    constraint.advance(5)
    assert (allowed_ids(constraint), inner.tokens) == ({69}, [5])


def test_a_contradiction_ends_the_sequence_with_an_error() -> None:
    constraint = TokenRules(VOCAB, allowed=[5]).start(Only(6))
    assert len(allowed_ids(constraint)) == 96
    with pytest.raises(ConstraintError, match="contradict"):
        constraint.advance(6)
