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

    ``matches`` has, for each token, the number of equal tokens in the match that it follows, or one of the larger
    numbers in ``llm_serving.speculation.costs``.
    """

    token_ids: list[int] = field(default_factory=list)
    matches: list[int] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    """For each token of a sequence with a constraint: the mask of the tokens that may follow it."""
    places: list[int | None] = field(default_factory=list)
    """The places of the grammar before each token and after the last one. None where the next token is forced, and
    where the text is free.
    """

    def first(self, size: int) -> Draft:
        """Returns the first ``size`` tokens of the draft."""
        return Draft(self.token_ids[:size], self.matches[:size], self.masks[:size], self.places)


Guess = Callable[[list[int], Mask, int | None], tuple[int, int] | None]
"""Guesses the token after the draft so far, at a place where the constraint allows several tokens. Arguments: the
tokens of the draft, the mask of allowed tokens and the place. Returns an allowed token and its match, or None.
"""


def constrained_draft(fork: ForkableConstraint, max_drafts: int, guess: Guess) -> Draft:
    """Returns a draft of tokens that a constraint allows, with the mask after each of them.

    Takes the tokens that the constraint forces. Where it allows several tokens, ``guess`` chooses one. ``fork`` is a
    copy of the sequence's constraint, which this function advances. Each mask is computed once.
    """
    draft, forced, mask = Draft(), list[int](), fork.mask()
    while not fork.has_failed:
        forced = forced[1:] or fork.forced_tokens()
        place = None if forced else place_of(mask)
        draft.places.append(place)
        if len(draft.token_ids) == max_drafts:
            break
        found = (forced[0], FORCED) if forced else guess(draft.token_ids, mask, place)
        if found is None or not is_allowed(mask, found[0]):
            break
        try:
            fork.advance(found[0])
        except ConstraintError:
            break
        mask = fork.mask()
        if not fork.has_failed:
            draft.token_ids.append(found[0])
            draft.matches.append(found[1])
            draft.masks.append(mask)
    return draft
