"""Makes the drafts of a sequence with a constraint, for example a grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llm_serving.request import ConstraintError, ForkableConstraint
from llm_serving.speculation.costs import FORCED
from llm_serving.speculation.look_ahead import Mask, is_allowed
from llm_serving.speculation.places import place_of


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of a sequence's next tokens.

    ``matches`` says where each token comes from. A number n from 2 to 8: the last n tokens before the draft also occur
    earlier in the text, where the draft followed them. Larger numbers are constants of
    ``llm_serving.speculation.costs``, for example ``FORCED``, and name other sources.
    """

    token_ids: list[int] = field(default_factory=list)
    matches: list[int] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    """For each token of a sequence with a constraint, except perhaps the last one: the mask of the tokens that may
    follow it.
    """
    places: list[int | None] = field(default_factory=list)
    """The place in the grammar (``speculation.places``) before each token and after the last one. None where the next
    token is forced, and where the text is free.
    """

    def first(self, size: int) -> Draft:
        """Returns the first ``size`` tokens of the draft."""
        return Draft(self.token_ids[:size], self.matches[:size], self.masks[:size], self.places)


Guess = Callable[[list[int], Mask, int | None], tuple[int, int] | None]
"""Guesses the token after the draft so far, where the constraint allows several tokens.

Arguments: the tokens of the draft, the mask of allowed tokens, and the place in the grammar (None in free text).
Returns an allowed token with its element of ``Draft.matches``, or None.
"""


class DraftBuilder:
    """Builds the draft of a sequence with a constraint, token by token.

    Computing a mask may take a considerable part of the time of a decode step. So the builder guesses a token and
    computes the mask after this token only if ``extend`` is called. Without this mask, the token cannot be offered
    to the scheduler. It is then only compared with the sampled token.
    """

    def __init__(self, fork: ForkableConstraint, max_drafts: int, end_token_ids: frozenset[int], guess: Guess) -> None:
        """Guesses the first token. ``fork`` is a copy of the sequence's constraint, which the builder advances. The
        draft has at most ``max_drafts`` tokens. It ends before a token of ``end_token_ids``.

        A token that the constraint forces comes first. Where the constraint allows several tokens, ``guess`` chooses.
        """
        self.draft = Draft()
        self._fork = fork
        self._max_drafts = max_drafts
        self._end_token_ids = end_token_ids
        self._guess = guess
        self._forced = fork.forced_tokens()
        if self._forced:
            self._add_guess(None)
            return
        mask = fork.mask()
        if not fork.has_failed:
            self._add_guess(mask)

    def extend(self) -> bool:
        """Computes the mask after the last token, and guesses the next token. Returns False if the last token cannot be
        offered, because the constraint forbids it. Then the draft ends before this token.
        """
        draft = self.draft
        mask = self._mask_after(draft.token_ids[-1])
        if mask is None:
            del draft.token_ids[-1], draft.matches[-1]
            return False
        draft.masks.append(mask)
        self._forced = self._forced[1:] or self._fork.forced_tokens()
        self._add_guess(mask)
        return True

    def _mask_after(self, token_id: int) -> Mask | None:
        """Returns the mask after a token, or None if the constraint forbids the token."""
        try:
            self._fork.advance(token_id)
        except ConstraintError:
            return None
        mask = self._fork.mask()
        return None if self._fork.has_failed else mask

    def _add_guess(self, mask: Mask | None) -> None:
        """Adds a guess of the next token. ``mask`` has the allowed tokens. It may be None if the token is forced."""
        draft = self.draft
        place = None if self._forced or mask is None else place_of(mask)
        draft.places.append(place)
        if len(draft.token_ids) == self._max_drafts:
            return
        if self._forced:
            found: tuple[int, int] | None = (self._forced[0], FORCED)
        else:
            found = None if mask is None else self._guess(draft.token_ids, mask, place)
        if found is None or found[0] in self._end_token_ids or not (mask is None or is_allowed(mask, found[0])):
            return
        draft.token_ids.append(found[0])
        draft.matches.append(found[1])
