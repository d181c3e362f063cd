"""Constraints for the beams of a beam search. The state of a beam is the state of its parent beam plus one token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llm_serving.request import ConstraintError, ForkableConstraint

_EVERY_WORD = np.uint32(0xFFFFFFFF)


class BeamConstraint:
    """The constraint of one beam. Its state is made in the engine thread, when the first mask is needed.

    A step of a search generates one token of each beam. The longer beams then get constraints of their own, so this one
    never advances.
    """

    def __init__(self, state: ForkableConstraint, before: BeamConstraint | None = None, token_id: int = 0) -> None:
        """If ``before`` is None, ``state`` is the state of this beam. Otherwise, the beam is ``before`` plus
        ``token_id``, and the first call of ``mask`` makes its state.
        """
        self.num_words = state.num_words
        self.error = ""
        """The reason why the grammar rejects the tokens so far, or allows no next token. Empty if there is none."""
        self._state = state
        self._before = before
        self._token_id = token_id

    def extended(self, token_id: int) -> BeamConstraint:
        """Return the constraint of this beam with one more token."""
        return BeamConstraint(self._state, self, token_id)

    def advance(self, token_id: int) -> None:
        """Do nothing: the beams with a further token have constraints of their own."""

    def mask(self) -> npt.NDArray[np.uint32]:
        if not self.error:
            try:
                self._follow()
                mask = self._state.mask()
            except ConstraintError as error:
                self.error = str(error)
        if not self.error and self._state.has_failed:
            self.error = "no token may follow, or the grammar is too complex here"
        return np.full(self.num_words, _EVERY_WORD, np.uint32) if self.error else mask

    def _follow(self) -> None:
        """Make the state of this beam, once. Raises ConstraintError."""
        before, self._before = self._before, None
        if before is None:
            return
        state = before._state.fork()
        if state is None:
            raise ConstraintError("the state of the constraint cannot be copied")
        state.advance(self._token_id)
        self._state = state
