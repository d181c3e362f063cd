"""Tests that the event loop of an idle server is not measured, so that the process sleeps."""

from __future__ import annotations

import asyncio

import pytest

from llm_serving.server.http import loop_watch
from llm_serving.server.http.loop_watch import LoopWatch


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(loop_watch, "PERIOD_S", 0.001)
    monkeypatch.setattr(loop_watch, "AWAKE_S", 0.02)


async def pause_of(watch: LoopWatch) -> None:
    """Wait until the watch has no timer."""
    while watch._timer is not None:
        await asyncio.sleep(0.001)


def test_an_idle_loop_has_no_timer_until_a_client_sends_bytes():
    async def run() -> None:
        watch = LoopWatch()
        watch.start(lambda: False)
        await asyncio.wait_for(pause_of(watch), 10)
        watch.wake()
        assert watch._timer is not None
        watch.stop()

    asyncio.run(run())


def test_the_loop_is_measured_while_a_request_is_active():
    async def run() -> None:
        watch, busy = LoopWatch(), [True]
        watch.start(lambda: busy[0])
        await asyncio.sleep(0.1)
        assert watch._timer is not None
        busy[0] = False
        await asyncio.wait_for(pause_of(watch), 10)

    asyncio.run(run())


def test_a_stopped_watch_stays_stopped():
    async def run() -> None:
        watch = LoopWatch()
        watch.start(lambda: True)
        watch.stop()
        watch.wake()
        assert watch._timer is None

    asyncio.run(run())
