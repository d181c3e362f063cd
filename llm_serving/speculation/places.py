"""Guesses the next token where a grammar allows only a few tokens: the token that the model chose there last time.

Between the forced keys and the free values of JSON, a grammar allows colons, commas, quotation marks and white space in
several forms. A model usually writes the same form each time. A place is a position of the output with one of these
choices. Positions with the same set of allowed tokens are one place, even after another key or in another grammar.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.speculation.look_ahead import Mask

MAX_ALLOWED = 1024
"""Maximum number of allowed tokens of a place. Where a grammar allows more tokens, the text is free. There, an earlier
choice says little about the next token.
"""
MAX_PLACES = 1024
"""Maximum number of places that a ``Places`` object remembers. It limits the memory of the object to about 200 KB."""


def place_of(mask: Mask) -> int | None:
    """Returns the number of the place with these allowed tokens, or None if the mask allows too many tokens.

    Two places may have the same number by coincidence. A wrong guess changes no text.
    """
    used = mask[mask != 0]
    if used.size > MAX_ALLOWED or int.from_bytes(used.tobytes(), "little").bit_count() > MAX_ALLOWED:
        return None
    return hash(mask.tobytes())


@dataclass(frozen=True, slots=True)
class Follower:
    """The token that was sampled last at a place. ``is_repeated`` is True if the same token was sampled there the time
    before.
    """

    token_id: int
    is_repeated: bool


class Places:
    """Remembers the token that was sampled last at each place. Above ``MAX_PLACES``, forgets the place that was sampled
    least recently.
    """

    def __init__(self) -> None:
        self._followers: dict[int, Follower] = {}

    def note(self, place: int, token_id: int) -> None:
        """Records that this token was sampled at a place."""
        known = self._followers.pop(place, None)
        self._followers[place] = Follower(token_id, known is not None and known.token_id == token_id)
        if len(self._followers) > MAX_PLACES:
            del self._followers[next(iter(self._followers))]

    def guess(self, place: int) -> Follower | None:
        """Returns the token that was sampled last at a place, or None at a new place."""
        return self._followers.get(place)
