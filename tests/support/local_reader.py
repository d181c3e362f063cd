"""Replaces a library for one-sided reads: copies blocks between pools of this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from llm_serving.handover.transport import Pairs, Pool, TransferError

__all__ = ["LocalReader"]

Places = dict[bytes, Sequence[Pool]]
_numbers = itertools.count()


class LocalReader:
    """A ``BlockReader`` without a library. All readers with the same ``places`` reach each other.

    ``after_block`` is called after each block that was read, with the block of the own pools.
    """

    def __init__(self, pools: Sequence[Pool], places: Places, after_block: Callable[[int], None] | None = None) -> None:
        self._pools, self._places, self._after_block = pools, places, after_block
        self._place = f"place {next(_numbers)}".encode()
        places[self._place] = pools

    def place(self) -> bytes:
        return self._place

    def read(self, place: bytes, pairs: Pairs) -> None:
        there = self._places.get(place)
        if there is None:
            raise TransferError(f"there are no pools at {place!r}")
        for source, target in pairs:
            for own, other in zip(self._pools, there, strict=True):
                own.blocks[target] = other.blocks[source]
            if self._after_block is not None:
                self._after_block(target)

    def close(self) -> None:
        self._places.pop(self._place, None)
