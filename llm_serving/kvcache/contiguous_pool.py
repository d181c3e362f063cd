"""A pool that allocates consecutive blocks in contiguous ranges, for ``page_attention: false``."""

from __future__ import annotations

from llm_serving.kvcache.block_pool import NULL_BLOCK


class ContiguousPool:
    """Blocks ``1 .. num_blocks - 1``, allocated in ranges of consecutive ids by first fit (Knuth 1968, 2.5)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; it must be at least 2 (block {NULL_BLOCK} is the null block)"
            )
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks - 1
        self._taken = bytearray(num_blocks)
        self._taken[NULL_BLOCK] = 1

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` consecutive free blocks with the lowest possible ids, or None if no free range is long
        enough.
        """
        start = self._taken.find(bytes(count))
        if start < 0:
            return None
        self._taken[start : start + count] = b"\1" * count
        self.num_free_blocks -= count
        return list(range(start, start + count))

    def free(self, blocks: list[int]) -> None:
        """Makes blocks free again. Raises AssertionError for a block that is not allocated."""
        for block in blocks:
            if not self._taken[block] or block == NULL_BLOCK:
                raise AssertionError(f"block {block} is freed but not allocated")
            self._taken[block] = 0
        self.num_free_blocks += len(blocks)

    def snapshot(self) -> bytes:
        """Returns one byte per block: 1 if the block is allocated, otherwise 0."""
        return bytes(self._taken)

    def restore(self, state: bytes) -> None:
        """Restores the state that ``snapshot`` returned."""
        self._taken = bytearray(state)
        self.num_free_blocks = state.count(0)

    def check_integrity(self, held: list[int]) -> None:
        """Raises AssertionError unless each usable block is free or occurs once in ``held``."""
        num_taken = self._taken.count(1) - 1
        if len(held) + self.num_free_blocks != self.num_usable_blocks or num_taken != len(held):
            raise AssertionError(
                f"{len(held)} blocks held and {self.num_free_blocks} free are not {self.num_usable_blocks} in total"
            )
        if len(set(held)) != len(held) or any(not self._taken[block] for block in held):
            raise AssertionError(f"blocks are held twice, or held while free: {sorted(held)}")
