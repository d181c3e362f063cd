"""Finds drafts in a sequence's own tokens: the tokens that followed earlier occurrences of its last tokens.

This is prompt lookup (Saxena 2023) with an index. The index maps each pair of adjacent tokens to its latest position.
It also maps each position to the previous position of the same pair. A lookup follows this chain and compares the
tokens before each position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_MATCH, MAX_MATCH = 2, 8
"""A lookup finds earlier positions at which the last ``MIN_MATCH`` tokens or more occur, and compares at most the last
``MAX_MATCH`` tokens.

The keys of the index are pairs of tokens, so a larger ``MIN_MATCH`` needs larger keys.
"""
MAX_INDEXED_TOKENS = 32_768
"""Maximum number of tokens in an index. It bounds the memory of a sequence's index to about 5 MB."""
_MAX_PLACES = 6
"""Maximum number of earlier positions that a lookup compares, the latest first."""
_NONE = -1


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a lookup: the tokens that followed an earlier occurrence of the last tokens, and the number of
    equal tokens (``length``).
    """

    token_ids: list[int]
    length: int


class SuffixIndex:
    """The tokens of one sequence with an index of their pairs. Appending a token takes constant time."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        """``token_ids`` are the first tokens of the sequence. If there are too many, only the last ones are indexed."""
        known = list(token_ids)[-MAX_INDEXED_TOKENS // 2 :]
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}
        self._previous: list[int] = []
        self.extend(known)

    def __len__(self) -> int:
        """Returns the number of indexed tokens."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens. If the index is full, it first forgets the older half of its tokens."""
        tokens, latest, previous = self._tokens, self._latest, self._previous
        for token_id in token_ids:
            if len(tokens) >= MAX_INDEXED_TOKENS:
                kept = tokens[-MAX_INDEXED_TOKENS // 2 :]
                for part in (tokens, latest, previous):
                    part.clear()
                self.extend(kept)
            place = len(tokens)
            pair = (tokens[-1] << 32 | token_id) if place else _NONE
            previous.append(latest.get(pair, _NONE))
            latest[pair] = place
            tokens.append(token_id)

    def propose(self, num_tokens: int, guessed: Sequence[int] = ()) -> Match | None:
        """Returns ``num_tokens`` tokens that followed the longest match of the last tokens, or None without a match.

        The last tokens are those of the sequence, followed by ``guessed``. If two matches are equally long, the later
        match counts. If the sequence has fewer than ``num_tokens`` tokens after the match, these tokens are repeated.
        """
        tokens, previous = self._tokens, self._previous
        if num_tokens < 1 or len(tokens) <= MIN_MATCH:
            return None
        last = [*tokens[-MAX_MATCH:], *guessed][-MAX_MATCH:] if guessed else tokens[-MAX_MATCH:]
        place = self._latest.get(last[-2] << 32 | last[-1], _NONE) if guessed else previous[-1]
        best, best_place = 0, _NONE
        for _ in range(_MAX_PLACES):
            if place == _NONE or best == MAX_MATCH:
                break
            length = self._match_length(place, last)
            if length > best and place + 1 < len(tokens):
                best, best_place = length, place
            place = previous[place]
        return Match(self._following(best_place, num_tokens), best) if best else None

    def _match_length(self, place: int, last: list[int]) -> int:
        """Returns the number of tokens that end at ``place`` and equal the last tokens. The caller knows that the last
        two are equal.
        """
        tokens, length = self._tokens, MIN_MATCH
        most = min(len(last), place + 1)
        while length < most and tokens[place - length] == last[-1 - length]:
            length += 1
        return length

    def _following(self, place: int, num_tokens: int) -> list[int]:
        """Returns ``num_tokens`` tokens after ``place``. If fewer tokens are known, repeats them."""
        found = self._tokens[place + 1 : place + 1 + num_tokens]
        for index in range(num_tokens - len(found)):
            found.append(found[index])
        return found
