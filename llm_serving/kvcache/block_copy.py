"""Copies of blocks that a step in flight makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llm_serving.kvcache.block_pool import BlockPool

__all__ = ["BlockCopies", "BlockCopy"]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of block ``source`` to block ``destination``, which belongs to a block table.

    The source is held until the copy ends. So no other sequence overwrites it when its last holder frees it.
    """

    source: int
    destination: int


class BlockCopies:
    """Holds the sources of the copies that have begun and not ended."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sources: Counter[int] = Counter()
        self.num_under_way = 0

    def begin(self, source: int) -> BlockCopy:
        """Begins a copy of a held or cached block to a new block of the caller. Another block than the source must be
        free."""
        self._pool.share([source])
        self._sources[source] += 1
        self.num_under_way += 1
        return BlockCopy(source, self._pool.allocate(1)[0])

    def end(self, copies: Iterable[BlockCopy]) -> None:
        """Ends copies, and frees their sources."""
        for copy in copies:
            count = self._sources.pop(copy.source, 0) - 1
            if count < 0:
                raise AssertionError(f"the copy of block {copy.source} to {copy.destination} has ended already")
            if count:
                self._sources[copy.source] = count
            self.num_under_way -= 1
            self._pool.free([copy.source])

    def sources(self) -> list[int]:
        """Returns the sources. A source occurs once per hold."""
        return list(self._sources.elements())

    def restore(self, sources: list[int]) -> None:
        """Restores what ``sources`` returned. The pool's reference counts already include the sources."""
        self._sources = Counter(sources)
        self.num_under_way = len(sources)
