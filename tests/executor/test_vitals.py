"""Tests which agents may still reply to a probe, by the states of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from llm_serving.executor.vitals import ASLEEP_LOOKS, SilentAgents, _thread_states
from support.time_limits import time_limit


@pytest.fixture
def asleep() -> Iterator[int]:
    """Provides the id of a process that only sleeps."""
    with subprocess.Popen(["sleep", "600"]) as process:
        _wait_for_state(process.pid, "S")
        yield process.pid
        process.kill()


def _wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + time_limit(10.0)
    while _thread_states(pid) != {state}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_agents_that_compute_may_reply(asleep: int) -> None:
    agents = SilentAgents([os.getpid(), asleep])
    assert [agents.may_reply() for _ in range(ASLEEP_LOOKS + 1)] == [True] * (ASLEEP_LOOKS + 1)


def test_agents_that_sleep_do_not_reply(asleep: int) -> None:
    agents = SilentAgents([asleep])
    assert [agents.may_reply() for _ in range(ASLEEP_LOOKS)] == [True] * (ASLEEP_LOOKS - 1) + [False]


def test_a_stopped_agent_does_not_reply(asleep: int) -> None:
    os.kill(asleep, signal.SIGSTOP)
    _wait_for_state(asleep, "T")
    assert not SilentAgents([os.getpid(), asleep]).may_reply()


def test_an_agent_without_a_process_does_not_reply() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not SilentAgents([os.getpid(), process.pid]).may_reply()
    assert not SilentAgents([]).may_reply()
