"""A heap whose items can get another key, or be removed, wherever they are."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from llm_serving.scheduler.snapshot import Sequences, Stateful, load, save

__all__ = ["KeyedHeap"]

Item = TypeVar("Item", bound=Hashable)

_SLACK = 8


class KeyedHeap(Stateful, Generic[Item]):
    """Items by key, the least key first. Among equal keys the item that was set first comes first.

    A removed item, or an item with a new key, leaves its old entry in the heap. The entry is dropped when it reaches
    the top, or when old entries are more than half of the heap. Operations cost O(log n) amortised, memory is O(n).
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
        """Iterates in the order in which the items were first set, not in the order of keys."""
        return iter(self._entries)

    def set(self, item: Item, key: Any) -> None:
        """Adds an item, or gives it another key."""
        self._num_sets += 1
        entry = self._entries[item] = (key, self._num_sets, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> None:
        """Removes an item. Raises KeyError if it is not in the heap."""
        del self._entries[item]
        if not self._entries:
            self._heap.clear()

    def key(self, item: Item) -> Any:
        """Returns the key of an item in the heap."""
        return self._entries[item][0]

    def first(self) -> Item:
        """Returns the item with the least key. Raises IndexError if the heap is empty."""
        heap, entries = self._heap, self._entries
        while entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2]

    def snapshot(self) -> list[Any]:
        """Returns the number of ``set`` calls, then ``[item, key, number of its last set call]`` of each item."""
        return [self._num_sets, *([save(item), save(key), number] for key, number, item in self._entries.values())]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        self._num_sets, *entries = state
        for saved, key, number in entries:
            item: Item = load(saved, sequences)
            self._entries[item] = (load(key, sequences), number, item)
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
