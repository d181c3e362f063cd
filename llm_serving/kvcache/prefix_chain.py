"""The tokens of one sequence for lookups in the prefix cache: packed as bytes, with one hash for each full block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_serving.kvcache.block_hash import TOKEN_BYTES, BlockHash, pack_tokens


class PrefixChain:
    """The tokens of a sequence and the hashes of its blocks. A preempted sequence keeps its chain.

    Hashes are computed on demand. So if the first block of a prompt is not cached, only one hash is computed. Only the
    prefix cache may change the public fields.
    """

    def __init__(
        self, token_ids: Sequence[int], block_size: int, *, salt: bytes, root: bytes, block_hash: BlockHash
    ) -> None:
        self.salt = salt
        self.blocks: list[int] = []
        """The cached blocks that the last lookup found for the beginning of the chain."""
        self.entries: list[int] = []
        """The entries of the cached blocks (``PrefixIndex.entries``) at the last lookup."""
        self.announce_begin = 0
        self.announce_end = 0
        """The blocks with the numbers ``announce_begin .. announce_end - 1`` in the sequence are announced."""
        self.epoch = 0
        """The ``epoch`` of the prefix cache when the chain was made, or when its sequence last started."""
        self.num_adopted = 0
        """Number of tokens whose keys and values were in the prefix cache when the sequence last started."""
        self._packed = pack_tokens(token_ids)
        self._block_bytes = block_size * TOKEN_BYTES
        self._root = root
        self._block_hash = block_hash
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self._packed) // TOKEN_BYTES

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens.

        This method copies all tokens of the chain, so call it once per start of the sequence, not once per token.
        """
        self._packed += pack_tokens(token_ids)

    def hash_at(self, index: int) -> bytes:
        """Returns the chained hash of the full block with number ``index`` in the sequence."""
        hashes = self._hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self._root
            hashes.append(self._block_hash(parent + self.content(len(hashes))))
        return hashes[index]

    def content(self, index: int) -> bytes:
        """Returns the packed tokens of the full block with number ``index`` in the sequence."""
        size = self._block_bytes
        return self._packed[index * size : (index + 1) * size]

    def tokens(self, start: int, end: int) -> bytes:
        """Returns the tokens ``start .. end - 1``, packed as bytes."""
        return self._packed[start * TOKEN_BYTES : end * TOKEN_BYTES]

    def snapshot(self, tokens: bytes) -> dict[str, Any]:
        """Returns the chain as plain data. ``tokens`` replaces the chain's own packed tokens.

        A flight recording passes pseudonyms as ``tokens``.
        """
        return {
            "tokens": tokens,
            "blocks": self.blocks.copy(),
            "entries": self.entries.copy(),
            "announced": [self.announce_begin, self.announce_end],
            "epoch": self.epoch,
            "adopted": self.num_adopted,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state that ``snapshot`` returned."""
        self._packed, self._hashes = state["tokens"], []
        self.blocks, self.entries, self.epoch = state["blocks"], state["entries"], state["epoch"]
        self.num_adopted = state["adopted"]
        self.announce_begin, self.announce_end = state["announced"]
