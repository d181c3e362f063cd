"""Tests which agents may still reply to a probe, by the states of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from llm_serving.executor.pauses import COUNTED_S
from llm_serving.executor.vitals import (
    ASLEEP_LOOKS,
    GRACE_S,
    GRACE_STEPS,
    STOPPED_S,
    SilentAgents,
    Vitals,
    _descendants,
    _thread_states,
)
from support.time_limits import time_limit


@pytest.fixture
def asleep() -> Iterator[int]:
    """Provides the id of a process that only sleeps."""
    with subprocess.Popen(["sleep", "600"]) as process:
        _wait_for_state(process.pid, "S")
        yield process.pid
        process.kill()


def _wait_for_state(pid: int, state: str) -> None:
    _wait_until(lambda: _thread_states(pid) == {state})


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + time_limit(10.0)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("forecast_s", "longest_s", "min_sleep_s", "patience_s"),
    [
        (None, 0.0, 0.0, GRACE_S),
        (None, 3.0, 0.0, GRACE_S + 3.0 * GRACE_STEPS),
        (0.5, 3.0, 0.0, GRACE_S + 0.5 * GRACE_STEPS),
        (None, 0.0, 5.0, 5.0),
        (0.1, 0.0, 5.0, 5.0),
        (3.0, 0.0, 5.0, GRACE_S + 3.0 * GRACE_STEPS),
    ],
)
def test_the_patience_with_agents_that_sleep(
    asleep: int, forecast_s: float | None, longest_s: float, min_sleep_s: float, patience_s: float
) -> None:
    agents = Vitals([asleep], 0, may_sleep=False, min_sleep_s=min_sleep_s)
    for tick in range(int(patience_s * 4)):
        assert agents.look(100.0 + tick / 4, 99.0, forecast_s, longest_s) is None
    assert agents.look(100.0 + patience_s - 0.1, 99.0, forecast_s, longest_s) is None
    reason = agents.look(100.0 + patience_s, 99.0, forecast_s, longest_s)
    assert reason == f"agents from 0 have done nothing for {patience_s:.1f} s in the middle of a step"


def test_agents_that_may_wait_for_other_machines_are_quiet_but_not_lost(asleep: int) -> None:
    agents = Vitals([asleep], 0, may_sleep=False, waits_for_others=True)
    for tick in range(20):
        assert agents.look(100.0 + tick / 4, 99.0, 0.0, 0.0) is None
        assert agents.is_quiet(99.0) is (tick / 4 >= GRACE_S)
    assert not agents.is_quiet(104.9), "data have arrived after the last look"
    assert agents.look(105.0, 104.9, 0.0, 0.0) is None
    assert not agents.is_quiet(104.9)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_while_data_arrive_agents_may_sleep_but_not_be_stopped(asleep: int, is_stopped: bool) -> None:
    if is_stopped:
        os.kill(asleep, signal.SIGSTOP)
        _wait_for_state(asleep, "T")
    agents = Vitals([asleep], 0, may_sleep=False)
    reasons = [agents.look(100.0 + tick / 4, 99.0, 0.0, 0.0, 99.9 + tick / 4) for tick in range(20)]
    assert (reasons[int(4 * STOPPED_S)] is not None) is is_stopped
    assert is_stopped or reasons == [None] * 20


@pytest.mark.parametrize("waits_for_others", [False, True])
def test_an_agent_that_computes_without_end_is_lost(waits_for_others: bool) -> None:
    """It is found, although data from other machines arrive between all looks."""
    forecast_s = (0.05 - GRACE_S) / GRACE_STEPS  # for a limit of 0.05 s
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        agents, now = Vitals([process.pid], 0, may_sleep=False, waits_for_others=waits_for_others), 100.0
        deadline = time.monotonic() + time_limit(20.0)
        while (reason := agents.look(now, 99.0, forecast_s, 0.0, now - 0.1)) is None and time.monotonic() < deadline:
            now += 0.25
            time.sleep(0.02)
        process.kill()
    assert reason is not None
    assert "has computed for" in reason


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_pause_of_this_process_is_no_sleep_of_the_agents(asleep: int, is_stopped: bool) -> None:
    if is_stopped:
        os.kill(asleep, signal.SIGSTOP)
        _wait_for_state(asleep, "T")
    agents = Vitals([asleep], 0, may_sleep=False)
    assert agents.look(100.0, 99.0, 0.0, 0.0) is None
    assert agents.look(100.0 + 3600.0, 99.0, 0.0, 0.0) is None
    patience_s = (STOPPED_S if is_stopped else GRACE_S) - COUNTED_S
    assert agents.look(3700.0 + patience_s - 0.1, 99.0, 0.0, 0.0) is None
    assert agents.look(3700.0 + patience_s, 99.0, 0.0, 0.0) is not None


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


@pytest.mark.parametrize(("program", "works"), [("while :; do :; done", True), ("sleep 600", False)])
def test_an_agent_whose_child_works_may_reply(program: str, works: bool) -> None:
    """All threads of the agent and of its child sleep. The child's child works or sleeps."""
    family = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    nested = [sys.executable, "-I", "-S", "-c", family] * 2 + ["sh", "-c", f"echo; {program}; true"]
    with subprocess.Popen(nested, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1)
            _wait_for_state(process.pid, "S")
            if not works:  # three descendants: the last one is the program "sleep"
                _wait_until(lambda: [_thread_states(pid) for pid in _descendants([process.pid])] == [{"S"}] * 3)
            agents = SilentAgents([process.pid])
            expected = [True] * (ASLEEP_LOOKS + 1) if works else [True] * (ASLEEP_LOOKS - 1) + [False] * 2
            assert [agents.may_reply() for _ in range(ASLEEP_LOOKS + 1)] == expected
        finally:
            os.killpg(process.pid, signal.SIGKILL)
