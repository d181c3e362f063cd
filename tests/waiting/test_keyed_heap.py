from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.waiting.queue_order import KeyedHeap


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5) | st.none()), max_size=80))
def test_the_first_item_equals_that_of_a_sorted_list(changes: list[tuple[int, int | None]]) -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    model: dict[int, tuple[int, int]] = {}
    for when, (item, key) in enumerate(changes):
        if key is not None:
            heap.set(item, key)
            model[item] = (key, when)
        elif item in model:
            heap.remove(item)
            del model[item]
        assert len(heap) == len(model)
        assert set(heap) == set(model)
        if model:
            assert heap.first() == min(model, key=lambda item: model[item])
            assert heap.key(heap.first()) == min(model.values())[0]


def test_an_empty_heap_has_no_first_item() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    with pytest.raises(IndexError):
        heap.first()
    heap.set("a", 1)
    heap.remove("a")
    assert "a" not in heap
    with pytest.raises(IndexError):
        heap.first()
    with pytest.raises(KeyError):
        heap.remove("a")


def test_old_entries_do_not_accumulate() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    heap.set("last", 10**6)
    for key in range(10_000):
        heap.set("a", -key)
    assert len(heap._heap) <= 2 * 2 + 9
    assert heap.first() == "a"
