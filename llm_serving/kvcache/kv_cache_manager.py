"""Blocks on demand: from tokens to block tables.

A block table is a plain list of block ids that its sequence owns; entry ``i`` holds the keys and values of the
positions ``i * block_size .. (i + 1) * block_size - 1`` (paged attention, Kwon et al. 2023).
"""

from __future__ import annotations

from llm_serving.kvcache.block_pool import BlockPool

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Grows block tables from one pool and takes them back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Make ``block_table`` long enough for ``num_tokens`` tokens, in place. All or nothing: False when the
        free blocks do not suffice, and nothing has changed."""
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing <= 0:
            return True
        if missing > self._pool.num_free_blocks:
            return False
        block_table += self._pool.allocate(missing)
        return True

    def free(self, block_table: list[int]) -> None:
        """Take every block of the table back. The caller drops the list: it is left as it was."""
        self._pool.free(block_table)

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Raises AssertionError unless the tables and the free blocks are every usable block, each once."""
        self._pool.check_integrity([block for table in block_tables for block in table])
