"""Names for tokens that tell which prefixes are equal, and nothing else.

Token ``i`` of a sequence is written as ``BLAKE2b(key, salt, tokens 0 .. i)`` cut to 31 bits. Two sequences of one salt
have equal names as far as their tokens are equal, and no further (but for one chance in 2^31), which is all a prefix
cache asks. The key is made for the process and never leaves it, so a recording cannot be searched for a known text.
It costs 0.4 us a token.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable

__all__ = ["ENDING_TOKEN", "FIRST_PSEUDONYM", "PLAIN_TOKEN", "PSEUDONYM_MASK", "Pseudonyms", "TokenChain"]

PLAIN_TOKEN = 0
"""Stands for a sampled token where names do not matter."""
ENDING_TOKEN = 1
"""Stands for one that ends its request."""
FIRST_PSEUDONYM = 2

_PACK = struct.Struct("<i").pack
PSEUDONYM_MASK = 0x7FFFFFFF


class TokenChain:
    """The names of one sequence's tokens, one after the other."""

    __slots__ = ("_hash", "digest", "update")

    def __init__(self, key: bytes, salt: bytes) -> None:
        self._begin(hashlib.blake2b(len(salt).to_bytes(4, "little") + salt, key=key, digest_size=4))

    def _begin(self, state: hashlib.blake2b) -> None:
        self._hash = state
        self.update: Callable[[bytes], None] = state.update
        self.digest: Callable[[], bytes] = state.digest
        """The last token's name is this, masked and not below ``FIRST_PSEUDONYM``."""

    def extend(self, token_ids: Iterable[int]) -> list[int]:
        """The names of the tokens that follow."""
        update, digest, from_bytes, pack = self.update, self.digest, int.from_bytes, _PACK
        names = []
        for token_id in token_ids:
            update(pack(token_id))
            names.append(max(from_bytes(digest(), "little") & PSEUDONYM_MASK, FIRST_PSEUDONYM))
        return names

    def copy(self) -> TokenChain:
        """A chain that goes on from here."""
        other: TokenChain = object.__new__(TokenChain)
        other._begin(self._hash.copy())
        return other


class Pseudonyms:
    """The chains of one process."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def chain(self, salt: bytes) -> TokenChain:
        return TokenChain(self._key, salt)
