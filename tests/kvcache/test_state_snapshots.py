"""Tests which snapshot is taken, published, held and evicted."""

from __future__ import annotations

import pytest

from llm_serving.kvcache.prefix_index import PrefixIndex
from llm_serving.kvcache.state_snapshots import MAX_COMPARED, StateSnapshots


def made(num_snapshots: int, num_blocks: int = 8) -> StateSnapshots:
    """Returns snapshots over an index in which block ``b`` has the entry ``10 * b``."""
    index = PrefixIndex(num_blocks)
    index.entries = [10 * block for block in range(num_blocks)]
    return StateSnapshots(num_snapshots, index)


def publish(snapshots: StateSnapshots, block: int) -> int:
    snapshot = snapshots.take()
    assert snapshot is not None
    snapshots.publish(10 * block, block, snapshot)
    return snapshot


def test_a_sequence_resumes_after_the_longest_prefix_with_a_state() -> None:
    snapshots = made(4)
    publish(snapshots, 1)
    publish(snapshots, 3)
    assert [snapshots.longest(entries) for entries in ([10, 20, 30, 40], [10, 20], [20, 40], [])] == [3, 1, 0, 0]


def test_the_least_recently_used_state_is_evicted_but_never_a_held_one() -> None:
    snapshots = made(3)
    first, second, third = (publish(snapshots, block) for block in (1, 2, 3))
    assert snapshots.hold(10) == first
    assert snapshots.take() == second
    assert snapshots.take() == third
    assert snapshots.take() is None
    snapshots.check_integrity([second, third])
    snapshots.let_go(first)
    assert snapshots.take() == first


def test_a_state_whose_block_is_no_longer_cached_is_evicted_first() -> None:
    snapshots = made(2)
    publish(snapshots, 1)
    stale = publish(snapshots, 2)
    snapshots._index.entries[2] = 99
    assert snapshots.take() == stale


class CountedList(list[int]):
    """A list that counts how many of its elements are read."""

    num_reads = 0

    def __getitem__(self, place: int) -> int:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(place)


def test_many_published_states_do_not_make_a_save_slow() -> None:
    num_snapshots = 10 * MAX_COMPARED
    snapshots = made(num_snapshots, num_snapshots + 1)
    published = [publish(snapshots, block) for block in range(1, num_snapshots + 1)]
    entries = snapshots._index.entries = CountedList(snapshots._index.entries)
    assert [snapshots.take() for _ in range(3)] == published[:3]
    assert entries.num_reads <= 3 * MAX_COMPARED


def test_a_second_state_of_a_block_is_freed() -> None:
    snapshots = made(2)
    publish(snapshots, 1)
    publish(snapshots, 1)
    assert snapshots.num_free == 1
    snapshots.check_integrity([])


def test_a_restored_object_has_the_same_states() -> None:
    snapshots, copy = made(3), made(3)
    held = publish(snapshots, 1)
    snapshots.hold(10)
    copy.restore(snapshots.snapshot())
    assert copy.longest([10]) == 1
    assert copy.snapshot() == snapshots.snapshot()
    copy.let_go(held)
    assert [copy.take() for _ in range(3)] == [1, 2, held]


def test_a_lost_snapshot_is_noticed() -> None:
    snapshots = made(2)
    snapshots.take()
    with pytest.raises(AssertionError, match="of 2 snapshots"):
        snapshots.check_integrity([])
