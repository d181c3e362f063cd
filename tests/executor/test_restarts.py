"""Tests when a lost group is restarted, with a fake clock."""

from __future__ import annotations

from llm_serving.executor.agent_states import STABLE_AFTER_S, Restarts
from support.recorded import RecordProperty


def ready_group(limit: int | None) -> Restarts:
    restarts = Restarts(limit)
    restarts.started()
    restarts.ready(100.0)
    return restarts


def test_a_group_that_was_never_ready_is_not_restarted() -> None:
    restarts = Restarts(5)
    restarts.started()
    assert restarts.lost(1.0) is None
    assert restarts.is_given_up
    assert (restarts.due_at, restarts.count, restarts.in_a_row) == (None, 0, 0)


def test_each_wait_is_twice_the_last_up_to_a_minute_and_restarts_never_stop(record_property: RecordProperty) -> None:
    restarts = ready_group(None)
    waits = []
    for _ in range(3000):
        waits.append(restarts.lost(101.0))
        restarts.started()
    least = [min(0.25 * 2 ** min(number, 8), 60.0) for number in range(3000)]
    short = sum(wait is None or wait < expected for wait, expected in zip(waits, least, strict=True))
    record_property("short_pauses", f"{short} of {len(waits)}")
    assert waits[:10] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert set(waits[10:]) == {60.0}
    assert (restarts.count, restarts.is_given_up, restarts.due_at) == (3000, False, None)


def test_a_restart_is_due_after_the_wait_until_it_is_started() -> None:
    restarts = ready_group(1)
    restarts.lost(101.0)
    assert restarts.due_at == 101.25
    restarts.started()
    assert restarts.due_at is None


def test_restarts_are_given_up_after_the_limit() -> None:
    restarts = ready_group(2)
    for _ in range(2):
        assert restarts.lost(101.0) is not None
        restarts.started()
        restarts.ready(102.0)
    assert restarts.lost(103.0) is None
    assert restarts.is_given_up
    assert (restarts.count, restarts.in_a_row, restarts.due_at) == (2, 2, None)


def test_a_stable_group_has_a_fresh_count_in_a_row_only() -> None:
    restarts = ready_group(1)
    assert restarts.lost(101.0) == 0.25
    restarts.started()
    restarts.ready(102.0)
    assert restarts.lost(102.0 + STABLE_AFTER_S) == 0.25
    assert (restarts.count, restarts.in_a_row, restarts.is_given_up) == (2, 1, False)


def test_time_without_a_ready_group_does_not_count_as_stable() -> None:
    restarts = ready_group(1)
    restarts.lost(101.0)
    restarts.started()
    assert restarts.lost(101.0 + 2 * STABLE_AFTER_S) is None
