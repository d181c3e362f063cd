"""A heap whose items can be given another key, or taken out, wherever they are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["KeyedHeap"]

Item = TypeVar("Item", bound=Hashable)

_SLACK = 8


class KeyedHeap(Generic[Item]):
    """Items by key, the least first; of equal keys the one set first.

    An item taken out, or given a new key, leaves its old entry in the heap until that comes to the top or such
    entries are the larger half of it: every operation costs O(log n) amortised, memory stays O(n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._entries: dict[Item, tuple[Any, int, Item]] = {}
        self._num_sets = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        """The items in the order they were first set, not in order of keys."""
        return iter(self._entries)

    def set(self, item: Item, key: Any) -> None:
        """Put an item in, or give it another key."""
        self._num_sets += 1
        entry = self._entries[item] = (key, self._num_sets, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> None:
        """Take an item out. Raises KeyError when it is not in."""
        del self._entries[item]
        if not self._entries:
            self._heap.clear()

    def key(self, item: Item) -> Any:
        """The key of an item that is in."""
        return self._entries[item][0]

    def first(self) -> Item:
        """The item with the least key. Raises IndexError when there is none."""
        heap, entries = self._heap, self._entries
        while entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2]

    def snapshot(self, save: Callable[[Item], Any]) -> list[Any]:
        """Returns the number of ``set`` calls, then ``[item, key, number of its last set call]`` of each item."""
        return [self._num_sets, *([save(item), key, number] for key, number, item in self._entries.values())]

    def restore(self, state: list[Any], load: Callable[[Any], Item]) -> None:
        """Restores what ``snapshot`` returned. ``load`` is the inverse of its ``save``."""
        self._num_sets, *entries = state
        for saved, key, number in entries:
            item = load(saved)
            self._entries[item] = (_as_key(key), number, item)
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)


def _as_key(value: Any) -> Any:
    """Returns a key with tuples in place of the lists that MessagePack makes of them."""
    return tuple(map(_as_key, value)) if isinstance(value, list | tuple) else value
