"""A pool of blocks in host memory, for the keys and values of swapped sequences."""

from __future__ import annotations


class HostBlockPool:
    """Allocates and frees the host blocks ``0 .. num_blocks - 1``.

    The block that was freed last is allocated first. The pool may have no blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_host_blocks is {num_blocks}; it must be at least 0")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken = bytearray(num_blocks)

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` blocks. If fewer blocks are free, returns None and changes nothing."""
        if count > len(self._free):
            return None
        start = len(self._free) - count
        blocks = self._free[start:]
        del self._free[start:]
        blocks.reverse()
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Makes blocks free again. Raises AssertionError for a block that is not allocated."""
        for block in blocks:
            if not self._taken[block]:
                raise AssertionError(f"host block {block} is freed but not allocated")
            self._taken[block] = 0
        self._free.extend(reversed(blocks))

    def snapshot(self) -> list[int]:
        """Returns the free blocks. The last block of the list is allocated next."""
        return self._free.copy()

    def restore(self, state: list[int]) -> None:
        """Restores the list that ``snapshot`` returned."""
        self._free = state
        self._taken = bytearray(b"\1" * self.num_blocks)
        for block in state:
            self._taken[block] = 0

    def check_integrity(self, held: list[int]) -> None:
        """Raises AssertionError unless each block is free or occurs once in ``held``."""
        if len(held) + len(self._free) != self.num_blocks or sum(self._taken) != len(held):
            raise AssertionError(
                f"{len(held)} host blocks held and {len(self._free)} free are not {self.num_blocks} in total"
            )
        if len(set(held)) != len(held) or any(not self._taken[block] for block in held):
            raise AssertionError(f"host blocks are held twice, or held while free: {sorted(held)}")
