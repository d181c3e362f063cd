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
        return asyncio.create_task(self.run(name))

    async def run(self, name: str) -> str:
        async with self.queue.place(name[0]):
            return await self._loop.run_in_executor(None, self._work, name)

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
        compilations = Compilations()
        try:
            await test(compilations)
        finally:
            compilations.go_on.release(1000)  # the threads of a failed test end

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
        for _ in range(MAX_COMPILING + 1):
            with pytest.raises(ZeroDivisionError):
                async with compilations.queue.place("a"):
                    raise ZeroDivisionError
        for number in range(MAX_COMPILING + 1):
            compilations.go_on.release()
            assert await asyncio.wait_for(compilations.start(f"a{number}"), time_limit(20)) == f"a{number}"

    run(test)


def test_the_number_of_waiting_compilations_of_a_tenant_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "MAX_WAITING_OF_TENANT", 3)

    async def test(compilations: Compilations) -> None:
        tasks = [compilations.start(f"a{number}") for number in range(1, MAX_COMPILING + 4)]
        await compilations.until_begun(MAX_COMPILING)
        with pytest.raises(QueueFullError, match="3 grammars of this client wait to be compiled, which is the maximum"):
            await asyncio.wait_for(compilations.start("a6"), time_limit(20))
        await compilations.finish(*tasks, compilations.start("b1"))
        assert "a6" not in compilations.begun
        again = compilations.start("a6")
        compilations.go_on.release()
        assert await again == "a6"

    run(test)


def test_a_full_queue_has_space_for_tenants_with_few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest compilation of the tenant with the most is refused instead. Equal shares stay."""
    monkeypatch.setattr(compile_queue, "MAX_WAITING", 4)

    async def test(compilations: Compilations) -> None:
        names = ("a1", "a2", "a3", "a4", "a5", "b1")
        tasks = {name: compilations.start(name) for name in names}
        await compilations.until_begun(MAX_COMPILING)
        full = "4 grammars wait to be compiled, which is the maximum"
        with pytest.raises(QueueFullError, match=full):
            await asyncio.wait_for(compilations.start("a6"), time_limit(20))
        for accepted, removed in (("c1", "a5"), ("d1", "a4")):
            tasks[accepted] = compilations.start(accepted)
            with pytest.raises(QueueFullError, match=full):
                await asyncio.wait_for(tasks.pop(removed), time_limit(20))
        for refused in ("a7", "b2", "e1"):
            with pytest.raises(QueueFullError, match=full):
                await asyncio.wait_for(compilations.start(refused), time_limit(20))
        await compilations.finish(*tasks.values())
        assert compilations.begun[MAX_COMPILING:] == ["a3", "b1", "c1", "d1"]

    run(test)


def test_a_compilation_that_no_longer_waits_has_no_turn() -> None:
    async def test(compilations: Compilations) -> None:
        tasks = {name: compilations.start(name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")}
        await compilations.until_begun(MAX_COMPILING)
        for name in ("a3", "b1"):
            tasks[name].cancel()
        await asyncio.gather(tasks.pop("a3"), tasks.pop("b1"), return_exceptions=True)
        assert compilations.queue.num_waiting == 2
        await compilations.finish(*tasks.values())
        assert compilations.begun[MAX_COMPILING:] == ["b2", "c1"]

    run(test)


def test_a_turn_that_is_cancelled_when_it_comes_is_given_to_the_next() -> None:
    """The place is free and the compilation has not noticed it yet, when its client leaves."""

    async def test(compilations: Compilations) -> None:
        queue = compilations.queue
        for _ in range(MAX_COMPILING):
            await queue._turn("a")
        first, second = compilations.start("b1"), compilations.start("c1")
        await asyncio.sleep(0)
        assert queue.num_waiting == 2
        queue._end()
        first.cancel()
        compilations.go_on.release()
        assert await asyncio.wait_for(second, time_limit(20)) == "c1"
        assert first.cancelled()
        assert (queue._num_running, compilations.begun) == (MAX_COMPILING - 1, ["c1"])

    run(test)
