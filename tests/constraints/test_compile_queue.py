"""Tests the queue of compilations: tenants take turns, and the number of waiting compilations is limited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from llm_serving.constraints import compile_queue
from llm_serving.constraints.compile_queue import MAX_COMPILING, CompileQueue
from llm_serving.errors import QueueFullError
from support.time_limits import time_limit


class Compilations:
    """Compilations that end one after the other, when the test lets them end."""

    def __init__(self) -> None:
        self.queue = CompileQueue()
        self.begun: list[str] = []
        self.go_on = threading.Semaphore(0)
        self._has_begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def start(self, name: str) -> asyncio.Task[str]:
        """Starts a compilation of the tenant that the first letter of its name states."""
        return asyncio.create_task(self.queue.run(name[0], lambda: self._work(name)))

    def _work(self, name: str) -> str:
        self.begun.append(name)
        self._loop.call_soon_threadsafe(self._has_begun.set)
        assert self.go_on.acquire(timeout=time_limit(20))
        return name

    async def until_begun(self, number: int) -> None:
        while len(self.begun) < number:
            await asyncio.wait_for(self._has_begun.wait(), time_limit(20))
            self._has_begun.clear()

    async def finish(self, *tasks: Awaitable[str]) -> None:
        for number in range(len(tasks)):
            await self.until_begun(min(number + MAX_COMPILING, len(tasks)))
            self.go_on.release()
        await asyncio.gather(*tasks)


def run(test: Callable[[Compilations], Awaitable[None]]) -> None:
    async def start() -> None:
        await test(Compilations())

    asyncio.run(start())


def test_tenants_take_turns() -> None:
    async def test(compilations: Compilations) -> None:
        tasks = [compilations.start(name) for name in ("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")]
        await compilations.finish(*tasks)
        assert sorted(compilations.begun[:MAX_COMPILING]) == ["a1", "a2"]
        assert compilations.begun[MAX_COMPILING:] == ["a3", "b1", "c1", "a4", "b2", "a5"]

    run(test)


def test_a_result_or_an_error_frees_the_place() -> None:
    async def test(compilations: Compilations) -> None:
        def fail() -> None:
            raise ZeroDivisionError

        for _ in range(MAX_COMPILING + 1):
            with pytest.raises(ZeroDivisionError):
                await compilations.queue.run("a", fail)
        for number in range(MAX_COMPILING + 1):
            assert await compilations.queue.run("a", lambda number=number: number) == number

    run(test)


@pytest.mark.parametrize(
    ("limit", "refused", "accepted"),
    [("MAX_WAITING_OF_TENANT", "a6", "b1"), ("MAX_WAITING", "b1", None)],
)
def test_the_number_of_waiting_compilations_is_limited(
    monkeypatch: pytest.MonkeyPatch, limit: str, refused: str, accepted: str | None
) -> None:
    monkeypatch.setattr(compile_queue, limit, 3)

    async def test(compilations: Compilations) -> None:
        tasks = [compilations.start(f"a{number}") for number in range(1, MAX_COMPILING + 4)]
        await compilations.until_begun(MAX_COMPILING)
        with pytest.raises(QueueFullError, match=r"3 grammars .*wait to be compiled, which is the maximum"):
            await compilations.start(refused)
        tasks += [] if accepted is None else [compilations.start(accepted)]
        await compilations.finish(*tasks)
        assert refused not in compilations.begun
        again = compilations.start(refused)
        compilations.go_on.release()
        assert await again == refused

    run(test)
