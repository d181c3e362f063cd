"""Limits the number of reasoning tokens of a sequence: after the limit, it forces the tokens of the marker that ends
the reasoning.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from llm_serving.parsing.thinking import ThinkingWatch
from llm_serving.request import Constraint, ForkableConstraint, forked

_EVERY_WORD = np.uint32(0xFFFFFFFF)


class ThinkingBudget:
    """A constraint that forces the marker at the end of the reasoning when the reasoning has ``budget`` tokens.

    Before and after the marker, it allows every token, or only the tokens that ``inner`` (a grammar) allows. The marker
    must not begin within a character, so the reasoning may be up to three tokens longer than ``budget``. Implements
    ``llm_serving.request.ForkableConstraint``.
    """

    def __init__(
        self,
        watch: ThinkingWatch,
        budget: int,
        end_token_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
        num_words: int,
        inner: Constraint | None,
    ) -> None:
        """``end_token_ids`` are the tokens of the marker that ends the reasoning."""
        self.num_words = num_words
        self._watch = watch
        self._budget = budget
        self._end = list(end_token_ids)
        self._token_bytes = token_bytes
        self._inner = inner
        self._decoder = _new_decoder()
        self._forced: list[int] = []
        self._force()

    def advance(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.advance(token_id)
        self._watch.advance(token_id)
        self._decoder.decode(self._token_bytes(token_id))
        if self._forced and token_id == self._forced[0]:
            self._forced = self._forced[1:]
        self._force()

    @property
    def has_failed(self) -> bool:
        return isinstance(self._inner, ForkableConstraint) and self._inner.has_failed

    def fork(self) -> ThinkingBudget | None:
        inner = forked(self._inner)
        if inner is None and self._inner is not None:
            return None
        fork = copy(self)
        fork._inner, fork._watch, fork._decoder = inner, copy(self._watch), _new_decoder()
        fork._decoder.setstate(self._decoder.getstate())
        return fork

    def forced_tokens(self) -> list[int]:
        if self._forced:
            return list(self._forced)
        forced = self._inner.forced_tokens() if isinstance(self._inner, ForkableConstraint) else []
        # The budget may end the reasoning before the grammar's next tokens.
        return forced[: max(0, self._budget - self._watch.num_tokens)] if self._watch.is_thinking else forced

    def mask(self) -> npt.NDArray[np.uint32]:
        if self._forced:
            mask = np.zeros(self.num_words, np.uint32)
            mask[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
            return mask
        return np.full(self.num_words, _EVERY_WORD, np.uint32) if self._inner is None else self._inner.mask()

    def _force(self) -> None:
        """Starts to force the end marker if the reasoning has used its budget and its last character is complete."""
        is_within_character = bool(self._decoder.getstate()[0])
        if not self._watch.is_thinking:
            self._forced = []
        elif not self._forced and self._watch.num_tokens >= self._budget and not is_within_character:
            self._forced = list(self._end)


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
