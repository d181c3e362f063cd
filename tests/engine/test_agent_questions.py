"""Tests that every question to the agents gets an answer: after lost replies, late replies and the engine's end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from llm_serving.errors import AgentLostError
from llm_serving.executor.base import AgentProfiled, AgentStatus
from support.served_engine import Served, served
from support.time_limits import time_limit

T = TypeVar("T")

LONG_S = 3600.0
"""A time limit of a question that no test waits for."""


async def soon(question: Awaitable[T]) -> T:
    """Returns the answer to a question. Fails if the answer does not come long before the question's time limit."""
    begun = time.monotonic()
    try:
        return await question
    finally:
        assert time.monotonic() - begun < time_limit(20.0)


def without_replies(serving: Served) -> list[str | None]:
    """Makes the agents reply to no question. Returns a list, to which each profile command appends its folder."""
    folders: list[str | None] = []

    def profile(folder: str | None) -> bool:
        folders.append(folder)
        return True

    serving.executor.profile = profile  # type: ignore[method-assign]
    serving.executor.request_status = lambda: None  # type: ignore[method-assign]
    return folders


def reply(serving: Served, error: str = "") -> None:
    serving.executor.push(AgentProfiled([{"rank": 0, "error": error}]))


def test_the_end_of_the_engine_ends_all_questions() -> None:
    """A reload of the model ends the engine of the old version, also while its agents start a profile."""

    async def run() -> None:
        async with served() as serving:
            folders = without_replies(serving)
            profile = asyncio.ensure_future(serving.engine.profile("folder", LONG_S))
            probe = asyncio.ensure_future(serving.engine.probe(LONG_S))
            await serving.until(lambda: folders == ["folder"])
            await serving.engine.stop()
            with pytest.raises(AgentLostError, match="the agents have ended"):
                await soon(profile)
            assert await soon(probe) is False
            with pytest.raises(AgentLostError):
                await soon(serving.engine.profile(None, LONG_S))
            assert await soon(serving.engine.probe(LONG_S)) is False

    asyncio.run(asyncio.wait_for(run(), time_limit(60.0)))


def test_agents_that_are_not_ready_are_the_answer() -> None:
    async def run() -> None:
        async with served() as serving:
            serving.executor.profile = lambda folder: False  # type: ignore[method-assign]
            [agent] = await soon(serving.engine.profile("folder", LONG_S))
            assert agent == {"replica": 0, "error": "the agents are not ready"}

    asyncio.run(asyncio.wait_for(run(), time_limit(60.0)))


def test_a_later_command_answers_the_earlier_one() -> None:
    async def run() -> None:
        async with served() as serving:
            folders = without_replies(serving)
            first = asyncio.ensure_future(serving.engine.profile("first", LONG_S))
            await serving.until(lambda: folders == ["first"])
            second = asyncio.ensure_future(serving.engine.profile("second", LONG_S))
            [agent] = await soon(first)
            assert "a later command" in str(agent["error"])
            await serving.until(lambda: folders == ["first", "second"])
            reply(serving, "of the second")
            assert await soon(second) == [{"rank": 0, "error": "of the second"}]

    asyncio.run(asyncio.wait_for(run(), time_limit(60.0)))


def test_an_answer_after_the_time_limit_is_not_that_of_the_next_command() -> None:
    async def run() -> None:
        async with served() as serving:
            folders = without_replies(serving)
            with pytest.raises(asyncio.TimeoutError):
                await serving.engine.profile("late", 0.01)
            second = asyncio.ensure_future(serving.engine.profile("second", LONG_S))
            await serving.until(lambda: folders == ["late", "second"])
            assert not second.done(), "the engine has answered the replaced command, not this one"
            reply(serving)
            assert await soon(second) == [{"rank": 0, "error": ""}]
            assert serving.engine._questions._profiles == {}

    asyncio.run(asyncio.wait_for(run(), time_limit(60.0)))


@pytest.mark.parametrize("is_profile", [False, True])
def test_a_slow_agent_is_not_a_dead_one(is_profile: bool) -> None:
    """The agent's process still computes, so the question waits for it. If the agent has no process, the question
    fails.
    """

    async def run() -> None:
        async with served() as serving:
            without_replies(serving)
            serving.executor.agents = lambda: [{"rank": 0, "pid": os.getpid()}]  # type: ignore[method-assign]
            threading.Timer(0.6, lambda: reply(serving) if is_profile else _reply_status(serving)).start()
            if is_profile:
                assert await soon(serving.engine.profile("folder", 0.01)) == [{"rank": 0, "error": ""}]
            else:
                assert await soon(serving.engine.probe(0.01)) is True
            serving.executor.agents = lambda: [{"rank": 0}]  # type: ignore[method-assign]
            if is_profile:
                with pytest.raises(asyncio.TimeoutError):
                    await soon(serving.engine.profile("folder", 0.01))
            else:
                assert await soon(serving.engine.probe(0.01)) is False

    end = threading.Event()
    computing = threading.Thread(target=_compute_until, args=(end,))
    computing.start()
    try:
        asyncio.run(asyncio.wait_for(run(), time_limit(60.0)))
    finally:
        end.set()
        computing.join()


def _reply_status(serving: Served) -> None:
    serving.executor.push(AgentStatus([]))


def _compute_until(end: threading.Event) -> None:
    while not end.is_set():
        sum(range(10_000))
