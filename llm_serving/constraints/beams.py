"""Constraints for the beams of a beam search. The state of a beam is the state of its parent beam plus one token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llm_serving.request import ConstraintError, ForkableConstraint

_EVERY_WORD = np.uint32(0xFFFFFFFF)


class BeamConstraint:
    """The constraint of one beam. Its state is computed in the engine thread, when the first mask is needed.

    Each step of the beam search extends the beams by one token. An extended beam gets a new ``BeamConstraint``, so the
    state of this object never advances.
    """

    def __init__(self, state: ForkableConstraint, before: BeamConstraint | None = None, token_id: int = 0) -> None:
        """``before`` is the constraint of the parent beam. ``token_id`` is the token that this beam adds to its parent.

        Without a parent, ``state`` is the state of this beam. With a parent, the first call of ``mask`` computes the
        state from that of the parent.
        """
        self.num_words = state.num_words
        self.error = ""
        """The reason why the grammar rejects the tokens so far, or allows no next token. Empty without an error."""
        self._state = state
        self._before = before
        self._token_id = token_id

    def extended(self, token_id: int) -> BeamConstraint:
        """Returns the constraint of the beam that extends this beam by ``token_id``."""
        return BeamConstraint(self._state, self, token_id)

    def advance(self, token_id: int) -> None:
        """Does nothing, because the extended beams have their own constraints."""

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
        """Computes the state of this beam, once. Raises ConstraintError if the token does not fit the grammar."""
        before, self._before = self._before, None
        if before is None:
            return
        state = before._state.fork()
        if state is None:
            raise ConstraintError("the state of the constraint cannot be copied")
        state.advance(self._token_id)
        self._state = state
