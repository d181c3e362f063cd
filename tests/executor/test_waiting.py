"""Tests one thread that waits for several executors.

The thread polls only executors that are ready, and never blocks on one of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest

from llm_serving.executor.base import AgentReady, ExecutorEvent, poll_all
from llm_serving.scheduler.output import ScheduledStep


class PipeExecutor:
    """An executor that has one result after each ``wake``. If ``due`` is given, it must also be polled at this time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.due: float | None = None
        self.polls: list[float | None] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    num_free_slots = 0

    def submit(self, step: ScheduledStep) -> None:
        raise AssertionError

    def abort(self, seq: int) -> None:
        raise AssertionError

    def distrust(self, check: str, reason: str, step: int | None = None) -> None:
        raise AssertionError

    def publish_masks(self, seq: int, masks: object) -> None:
        raise AssertionError

    def request_status(self) -> None:
        raise AssertionError

    def load_adapter(self, slot: int, memory: object) -> None:
        raise AssertionError

    def drop_adapter(self, slot: int) -> None:
        raise AssertionError

    def profile(self, folder: str | None) -> bool:
        raise AssertionError

    def agents(self) -> list[dict[str, object]]:
        return []

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        self.polls.append(timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
            return [AgentReady({"name": self.name})]
        return []

    def fileno(self) -> int:
        return self._event

    def next_due(self) -> float | None:
        return self.due

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        os.close(self._event)


@pytest.fixture
def three() -> Iterator[list[PipeExecutor]]:
    executors = [PipeExecutor(name) for name in "abc"]
    yield executors
    for executor in executors:
        executor.close()


def test_a_single_executor_waits_in_its_own_poll(three: list[PipeExecutor]) -> None:
    three[0].wake()
    assert poll_all(three[:1])(3.0) == [(0, AgentReady({"name": "a"}))]
    assert three[0].polls == [3.0]


def test_those_with_something_are_polled_without_waiting(three: list[PipeExecutor]) -> None:
    poll = poll_all(three)
    three[2].wake()
    three[1].wake()
    assert poll(10.0) == [(1, AgentReady({"name": "b"})), (2, AgentReady({"name": "c"}))]
    assert [executor.polls for executor in three] == [[], [0.0], [0.0]]
    assert poll(0.0) == []


def test_an_event_during_the_wait_ends_it(three: list[PipeExecutor]) -> None:
    poll = poll_all(three)
    timer = threading.Timer(0.05, three[1].wake)
    timer.start()
    began = time.monotonic()
    assert poll(None) == [(1, AgentReady({"name": "b"}))]
    assert time.monotonic() - began < 5.0
    timer.join()


def test_a_due_executor_is_polled_without_an_event(three: list[PipeExecutor]) -> None:
    poll = poll_all(three)
    three[0].due = time.monotonic() + 60.0
    three[2].due = time.monotonic() + 0.03
    began = time.monotonic()
    assert poll(None) == []
    assert 0.02 < time.monotonic() - began < 5.0
    assert [executor.polls for executor in three] == [[], [], [0.0]]
    assert poll(0.0) == [], "a time in the past does not wait"
