"""Tests the watch of the event loop: an idle loop is not measured, and a function that blocks the loop is named."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from llm_serving.server.http import loop_watch
from llm_serving.server.http.loop_watch import LoopWatch
from llm_serving.telemetry.log import EventLog
from support.time_limits import time_limit


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(loop_watch, "PERIOD_S", 0.001)
    monkeypatch.setattr(loop_watch, "AWAKE_S", 0.02)


async def pause_of(watch: LoopWatch) -> None:
    """Waits until the watch has no timer."""
    while watch._timer is not None:
        await asyncio.sleep(0.001)


def test_an_idle_loop_has_no_timer_until_a_client_sends_bytes():
    async def run() -> None:
        watch = LoopWatch()
        watch.start(lambda: False, EventLog(None))
        await asyncio.wait_for(pause_of(watch), 10)
        assert watch._stacks is not None
        assert not watch._stacks._is_awake.is_set()
        watch.wake()
        assert watch._timer is not None
        watch.stop()

    asyncio.run(run())


def test_the_loop_is_measured_while_a_request_is_active():
    async def run() -> None:
        watch, busy = LoopWatch(), [True]
        watch.start(lambda: busy[0], EventLog(None))
        await asyncio.sleep(0.1)
        assert watch._timer is not None
        busy[0] = False
        await asyncio.wait_for(pause_of(watch), 10)
        watch.stop()

    asyncio.run(run())


def test_a_stopped_watch_stays_stopped():
    async def run() -> None:
        watch = LoopWatch()
        watch.start(lambda: True, EventLog(None))
        watch.stop()
        watch.wake()
        assert watch._timer is None

    asyncio.run(run())


def _blocks_the_loop(watch: LoopWatch) -> None:
    """Computes in C, without giving up the interpreter lock, for much longer than a reported block.

    Repeats this until the thread has seen it, because a busy machine may wake the thread late.
    """
    deadline = time.monotonic() + time_limit(10.0)
    while not watch._stacks._found and time.monotonic() < deadline:  # a call of ``found`` would be on the stack
        sum(range(15_000_000))


def test_the_quiet_mode_measures_seldom_and_looks_only_at_loops_that_are_late() -> None:
    async def run() -> None:
        watch, loop = LoopWatch(), asyncio.get_running_loop()
        watch.start(lambda: True, EventLog(None), is_quiet=True)
        assert watch._timer is not None
        assert watch._timer.when() - loop.time() > loop_watch.QUIET_PERIOD_S / 2 > 10 * loop_watch.PERIOD_S
        assert watch._stacks is not None
        assert watch._stacks._look_every_s > loop_watch.QUIET_PERIOD_S
        watch.stop()

    asyncio.run(run())


@pytest.mark.parametrize("is_quiet", [False, True])
def test_the_function_that_blocks_the_loop_is_named_in_the_log(tmp_path: Path, is_quiet: bool) -> None:
    async def run() -> None:
        log = EventLog(str(tmp_path / "server.log"))
        watch = LoopWatch()
        watch.start(lambda: True, log, is_quiet=is_quiet)
        await asyncio.sleep(0.05)
        _blocks_the_loop(watch)
        await asyncio.sleep(0.15)
        watch.stop()
        log.close()

    num_threads = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() == num_threads
    lines = [json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines()]
    [blocked] = [line for line in lines if line["event"] == "event_loop_blocked" and "_blocks_the" in line["functions"]]
    innermost, caller, *_ = blocked["functions"].split(" < ")
    assert innermost.startswith("tests/server/test_loop_watch.py:")
    assert innermost.endswith(" _blocks_the_loop")
    assert caller.endswith(" run")
    assert blocked["seconds"] >= blocked["cpu_seconds"] >= loop_watch.REPORTED_S
