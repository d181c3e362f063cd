"""The tokens of one sequence as the prefix cache sees them: packed, and each full block hashed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_serving.kvcache.block_hash import TOKEN_BYTES, BlockHash, pack_tokens

__all__ = ["PrefixChain"]


class PrefixChain:
    """One for each sequence, made by ``KVCacheManager.new_chain`` and kept through preemptions.

    Hashes are computed when asked for: a prompt whose first block is not cached costs one. The public fields are
    the prefix cache's notes.
    """

    __slots__ = (
        "_block_bytes",
        "_block_hash",
        "_hashes",
        "_packed",
        "_root",
        "announce_begin",
        "announce_end",
        "blocks",
        "entries",
        "epoch",
        "salt",
    )

    def __init__(
        self, token_ids: Sequence[int], block_size: int, *, salt: bytes, root: bytes, block_hash: BlockHash
    ) -> None:
        self.salt = salt
        self.blocks: list[int] = []
        """Cached blocks that held the chain's first blocks when last looked at: the sequence's own, or equal ones."""
        self.entries: list[int] = []
        """Their entries then."""
        self.announce_begin = 0
        self.announce_end = 0
        """The blocks ``announce_begin .. announce_end - 1`` are announced."""
        self.epoch = 0
        self._packed = pack_tokens(token_ids)
        self._block_bytes = block_size * TOKEN_BYTES
        self._root = root
        self._block_hash = block_hash
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self._packed) // TOKEN_BYTES

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens that follow those known so far. Costs a copy of them all: once a restart, not once a token."""
        self._packed += pack_tokens(token_ids)

    def hash_at(self, index: int) -> bytes:
        """The chained hash of full block ``index``."""
        hashes = self._hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self._root
            hashes.append(self._block_hash(parent + self.content(len(hashes))))
        return hashes[index]

    def content(self, index: int) -> bytes:
        """The packed tokens of full block ``index``."""
        size = self._block_bytes
        return self._packed[index * size : (index + 1) * size]

    def tokens(self, start: int, end: int) -> bytes:
        """The packed tokens ``start .. end - 1``."""
        return self._packed[start * TOKEN_BYTES : end * TOKEN_BYTES]

    def snapshot(self, tokens: bytes) -> dict[str, Any]:
        """Returns the chain's notes, with ``tokens`` in place of its packed tokens."""
        return {
            "tokens": tokens,
            "blocks": self.blocks.copy(),
            "entries": self.entries.copy(),
            "announced": [self.announce_begin, self.announce_end],
            "epoch": self.epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what ``snapshot`` returned."""
        self._packed, self._hashes = state["tokens"], []
        self.blocks, self.entries, self.epoch = state["blocks"], state["entries"], state["epoch"]
        self.announce_begin, self.announce_end = state["announced"]

    def fork(self, num_tokens: int) -> PrefixChain:
        """A chain that begins with this one's first ``num_tokens`` tokens; what it hashed is kept."""
        other: PrefixChain = object.__new__(PrefixChain)
        other.salt, other.epoch = self.salt, self.epoch
        other._packed = self.tokens(0, num_tokens)
        other._block_bytes, other._root, other._block_hash = self._block_bytes, self._root, self._block_hash
        num_blocks = len(other._packed) // self._block_bytes
        other._hashes = self._hashes[:num_blocks]
        other.blocks, other.entries = self.blocks[:num_blocks], self.entries[:num_blocks]
        other.announce_begin = other.announce_end = 0
        return other
