"""Copies of blocks that are on their way to the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llm_serving.kvcache.block_pool import BlockPool

__all__ = ["BlockCopies", "BlockCopy"]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy block ``source`` to block ``destination``, which a table holds. The source stays held until the copy is
    ended, so that whoever else gives it up meanwhile does not let it be overwritten."""

    source: int
    destination: int


class BlockCopies:
    """Holds the sources of copies that were begun and not ended."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sources: Counter[int] = Counter()
        self.num_under_way = 0

    def begin(self, source: int) -> BlockCopy:
        """Copy a held or cached block to a new one, which is the caller's; one is free besides the source."""
        self._pool.share([source])
        self._sources[source] += 1
        self.num_under_way += 1
        return BlockCopy(source, self._pool.allocate(1)[0])

    def end(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            count = self._sources.pop(copy.source, 0) - 1
            if count < 0:
                raise AssertionError(f"the copy of block {copy.source} to {copy.destination} has ended already")
            if count:
                self._sources[copy.source] = count
            self.num_under_way -= 1
            self._pool.free([copy.source])

    def sources(self) -> list[int]:
        """The sources, each as often as it is held."""
        return list(self._sources.elements())

    def restore(self, sources: list[int]) -> None:
        """Restores what ``sources`` returned. The pool's reference counts already include the sources."""
        self._sources = Counter(sources)
        self.num_under_way = len(sources)
