"""Records which blocks requests asked to keep in host memory, until when, and within which limits. ``host_blocks`` uses
the record when it chooses blocks for reuse.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

_SPARE_ENDS = 1024
"""The heap of ``KeptBlocks`` may have twice as many entries as there are kept blocks, plus this number. A larger heap
is rebuilt without outdated entries.
"""


class KeptBlocks:
    """The blocks that requests asked to keep in host memory, by chained hash: at most ``max_blocks`` in total, and
    ``max_per_owner`` of each owner.

    A block counts for the owner that first asked to keep it, even if another owner later extends the time.
    """

    def __init__(self, max_blocks: int, max_per_owner: int) -> None:
        self._max_blocks = max_blocks
        self._max_per_owner = max_per_owner
        self._until: dict[bytes, float] = {}
        self._owners: dict[bytes, str] = {}
        self._counts: dict[str, int] = {}
        self._ends: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, chained_hash: bytes) -> bool:
        return chained_hash in self._until

    @property
    def next_end(self) -> float:
        """The earliest time at which a block may cease to be kept. Infinity if no block is kept."""
        return self._ends[0][0] if self._ends else float("inf")

    def keep(self, owner: str, hashes: Iterable[bytes], until: float) -> list[bytes]:
        """Keeps the blocks with these hashes until the time ``until``, in order, as long as the limits permit. Returns
        the hashes that were not kept before.
        """
        new: list[bytes] = []
        for each in hashes:
            if each not in self._until:
                if len(self._until) >= self._max_blocks or self._counts.get(owner, 0) >= self._max_per_owner:
                    break
                self._owners[each] = owner
                self._counts[owner] = self._counts.get(owner, 0) + 1
                new.append(each)
            elif self._until[each] >= until:
                continue
            self._until[each] = until
            heapq.heappush(self._ends, (until, each))
        # If a block is kept for longer, the heap gets another entry, and the old one stays. If there are many old
        # entries, the heap is built again without them.
        if len(self._ends) > 2 * len(self._until) + _SPARE_ENDS:
            self._ends = [(end, each) for each, end in self._until.items()]
            heapq.heapify(self._ends)
        return new

    def expire(self, now: float) -> list[bytes]:
        """Removes the blocks whose time is over at ``now``. Returns their hashes."""
        ended: list[bytes] = []
        while self._ends and self._ends[0][0] <= now:
            end, each = heapq.heappop(self._ends)
            if self._until.get(each) != end:
                continue  # the block was given a later time, or is not kept any more
            del self._until[each]
            owner = self._owners.pop(each)
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]
            ended.append(each)
        return ended
