"""Tests how the engine thread loads adapters into replicas, and which replies of the executors count."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.engine.adapter_loading import EngineAdapters
from llm_serving.engine.adapters import AgentAdapters
from llm_serving.engine.agent_questions import AgentQuestions
from llm_serving.engine.commands import DropAdapter, LoadAdapter
from llm_serving.engine.outputs import AdapterAnswer


class Memory:
    """Stands for the shared memory of an adapter."""

    def close(self) -> None: ...


class Executor:
    """An executor that never replies. If its agents are ready, it returns a number for each load."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.is_ready = is_ready
        self.slots: list[int] = []

    def load_adapter(self, slot: int, memory: Any) -> int | None:
        self.slots.append(slot)
        return len(self.slots) if self.is_ready else None

    def drop_adapter(self, slot: int) -> None: ...


def adapters_of(*executors: Executor, is_ready: bool = True) -> AgentAdapters:
    """Returns the adapters of replicas with these executors. ``is_ready``: the engine has processed their
    ``AgentReady``.
    """
    replicas: list[Any] = [
        SimpleNamespace(index=index, executor=executor, is_ready=is_ready) for index, executor in enumerate(executors)
    ]
    return AgentAdapters(replicas)


MEMORY: Any = Memory()


def test_a_late_reply_to_a_load_that_was_given_up_does_not_answer_the_next_load() -> None:
    adapters = adapters_of(Executor(), Executor())
    assert adapters.load(0, MEMORY, 7) == []
    assert adapters.answer(0, 1, "") == []
    adapters.drop(0)
    assert adapters.load(0, MEMORY, 8) == []
    assert adapters.answer(0, 1, "late") == []
    assert adapters.answer(1, 1, "late") == []
    assert adapters.answer(0, 2, "") == []
    assert adapters.answer(1, 2, "") == [AdapterAnswer(8, "")]


def test_a_dropped_load_has_no_answer() -> None:
    adapters = adapters_of(Executor())
    assert adapters.load(0, MEMORY, 7) == []
    adapters.drop(0)
    assert adapters.lose(0) == []
    assert adapters.answer(0, 1, "") == []
    assert adapters.close() == []


def test_a_replica_that_just_became_ready_must_reply() -> None:
    """Its executor sends the adapter. The engine has not processed ``AgentReady`` yet."""
    adapters = adapters_of(Executor(), Executor(is_ready=False), is_ready=False)
    assert adapters.load(0, MEMORY, 7) == []
    assert adapters.lose(1) == []
    assert adapters.answer(0, 1, "no memory") == [AdapterAnswer(7, "no memory")]


def test_without_ready_agents_the_answer_is_immediate() -> None:
    executor = Executor(is_ready=False)
    assert adapters_of(executor).load(3, MEMORY, 7) == [AdapterAnswer(7, "")]
    assert executor.slots == [3]


def test_a_late_answer_does_not_end_the_wait_for_the_next_adapter() -> None:
    async def run() -> None:
        commands: list[Any] = []
        core: Any = SimpleNamespace(submit=commands.append, ended=False)
        questions = AgentQuestions(core)
        with pytest.raises(asyncio.TimeoutError):
            await questions.load_adapter(0, MEMORY, 0.001)
        second = asyncio.ensure_future(questions.load_adapter(0, MEMORY, 60.0))
        await asyncio.sleep(0)
        questions.take(AdapterAnswer(commands[0].number, "the first one was late"))
        questions.take(AdapterAnswer(commands[1].number, ""))
        await second

    asyncio.run(run())


def test_an_adapter_whose_load_timed_out_is_dropped() -> None:
    """If the adapter were not dropped, its memory would stay, and restarted agents would load it."""

    async def run() -> None:
        commands: list[Any] = []
        core: Any = SimpleNamespace(submit=commands.append, ended=False)
        adapters = EngineAdapters(1, core, AgentQuestions(core))
        with pytest.raises(asyncio.TimeoutError):
            await adapters.load("a", "/adapters/a", b"a", MEMORY, 0.001)
        assert commands == [LoadAdapter(1, 0, MEMORY), DropAdapter(0)]
        assert adapters.take_slot() == 0

    asyncio.run(run())
