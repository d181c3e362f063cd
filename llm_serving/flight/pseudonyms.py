"""Computes pseudonyms, which replace tokens in a flight recording. Pseudonyms only reveal which prefixes are equal.

The pseudonym of token ``i`` of a sequence is ``BLAKE2b(key, salt, tokens 0 .. i)``, cut to 31 bits. If two sequences
have the same salt and their first n tokens are equal, their first n pseudonyms are equal. From the first different
token on, two pseudonyms are equal only with a probability of 2^-31. A replay's prefix cache therefore finds the same
prefixes. The key never leaves the process, so a recording cannot be searched for a known text. Computing a pseudonym
takes 0.4 us.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable

PLAIN_TOKEN = 0
"""Token id that a replay uses for recorded tokens that did not end their request, if the recording has no pseudonyms.
"""
ENDING_TOKEN = 1
"""Token id that a replay uses for recorded tokens that ended their request."""
FIRST_PSEUDONYM = 2
"""Smallest pseudonym of a token."""

_PACK = struct.Struct("<i").pack
PSEUDONYM_MASK = 0x7FFFFFFF


class TokenChain:
    """Computes the pseudonyms of one sequence, token by token."""

    __slots__ = ("_hash", "digest", "update")

    def __init__(self, key: bytes, salt: bytes) -> None:
        self._begin(hashlib.blake2b(len(salt).to_bytes(4, "little") + salt, key=key, digest_size=4))

    def _begin(self, state: hashlib.blake2b) -> None:
        self._hash = state
        self.update: Callable[[bytes], None] = state.update
        self.digest: Callable[[], bytes] = state.digest
        """Returns the hash of all tokens so far. Its low 31 bits are the pseudonym of the latest token."""

    def extend(self, token_ids: Iterable[int]) -> list[int]:
        """Appends tokens to the sequence and returns their pseudonyms."""
        update, digest, from_bytes, pack = self.update, self.digest, int.from_bytes, _PACK
        names = []
        for token_id in token_ids:
            update(pack(token_id))
            names.append(max(from_bytes(digest(), "little") & PSEUDONYM_MASK, FIRST_PSEUDONYM))
        return names

    def copy(self) -> TokenChain:
        """Returns an independent chain with the same tokens."""
        other: TokenChain = object.__new__(TokenChain)
        other._begin(self._hash.copy())
        return other


class Pseudonyms:
    """Creates ``TokenChain`` objects that share one secret key, which is random by default."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def chain(self, salt: bytes) -> TokenChain:
        return TokenChain(self._key, salt)
