"""The pool of KV cache blocks: which are free, which are taken. Ids only; the memory is the agent's."""

from __future__ import annotations

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
"""Pads block tables. It is never given out, so that a padded entry can be read but belongs to nobody."""


class BlockPool:
    """Blocks ``1 .. num_blocks - 1``. Whoever allocates a block frees it, once.

    Freed blocks are given out again last in, first out: they are the ones still warm in the device's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give: block {NULL_BLOCK} is the null block")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._taken = bytearray(num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has seen that so many are free."""
        if count > len(self._free):
            raise AssertionError(f"{count} blocks asked for, {len(self._free)} are free")
        start = len(self._free) - count
        blocks = self._free[start:]
        del self._free[start:]
        blocks.reverse()
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back. A block that is not taken (freed twice, never given out, null) is a bug."""
        taken = self._taken
        for block in blocks:
            if not taken[block]:
                raise AssertionError(f"block {block} is given back but was not taken")
            taken[block] = 0
        self._free.extend(reversed(blocks))

    def check_integrity(self, held: list[int]) -> None:
        """Raises AssertionError unless ``held`` and the free blocks are every usable block, each once."""
        if len(held) + len(self._free) != self.num_usable_blocks:
            raise AssertionError(
                f"{len(held)} blocks held and {len(self._free)} free do not make {self.num_usable_blocks}"
            )
        if len(set(held)) != len(held) or any(not self._taken[block] for block in held):
            raise AssertionError(f"blocks are held twice, or held while free: {sorted(held)}")
        if sum(self._taken) != len(held) or self._taken[NULL_BLOCK]:
            raise AssertionError(f"{sum(self._taken)} blocks are taken, {len(held)} are held")
