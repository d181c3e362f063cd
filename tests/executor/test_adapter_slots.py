"""Tests when adapters are sent to the agents of a group, and what follows from the replies."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from llm_serving.errors import AgentLostError
from llm_serving.executor.adapter_slots import AdapterSlots
from llm_serving.executor.base import AdapterAnswered
from llm_serving.ipc.messages import AdapterLoaded


class Memory:
    """Stands for the shared memory of an adapter."""

    def __init__(self, name: str) -> None:
        self.name, self.num_bytes = name, 64


def sent(messages: list[Any]) -> list[tuple[int, str]]:
    assert all(message.shm_name == memory.name for message, memory in messages)
    return [(message.adapter_slot, message.shm_name) for message, _ in messages]


def reply(slot: int, error: str = "", seq: int = 1) -> AdapterLoaded:
    return AdapterLoaded(seq=seq, adapter_slot=slot, error=error)


def test_an_adapter_waits_for_the_steps_in_flight() -> None:
    slots = AdapterSlots(2)
    slots.load(9, 1, Memory("a"), [5, 6])  # type: ignore[arg-type]
    assert slots.due({5: 0, 6: 1, 7: 2}) == []
    assert slots.due({6: 1, 7: 2}) == []
    assert sent(slots.due({7: 2, 8: 0})) == [(1, "a")]
    assert slots.due({}) == []
    assert slots.take(reply(1, seq=9)) is None
    assert slots.take(reply(1, seq=9)) == AdapterAnswered(9)
    assert not slots.is_loading


def test_new_agents_load_all_adapters_again() -> None:
    slots = AdapterSlots(1)
    slots.keep(2, Memory("c"))  # type: ignore[arg-type]
    slots.keep(0, Memory("a"))  # type: ignore[arg-type]
    slots.load(9, 1, Memory("b"), [3])  # type: ignore[arg-type]
    slots.lose()
    assert sent(slots.again(lambda: 1)) == [(0, "a"), (1, "b"), (2, "c")]
    slots.drop(1)
    assert [slots.take(reply(slot)) for slot in (0, 1, 2)] == [None] * 3
    assert not slots.is_waiting
    assert slots.again(lambda: 1) == [], "the agents have them"
    slots.lose()
    assert sent(slots.again(lambda: 1)) == [(0, "a"), (2, "c")]


def test_new_agents_also_load_an_adapter_that_comes_while_they_load_the_others() -> None:
    slots = AdapterSlots(2)
    slots.keep(0, Memory("a"))  # type: ignore[arg-type]
    assert sent(slots.again(lambda: 1)) == [(0, "a")]
    slots.keep(1, Memory("b"))  # type: ignore[arg-type]
    slots.keep(0, Memory("c"))  # type: ignore[arg-type]
    assert [slots.take(reply(0)), slots.is_waiting] == [None, True]
    assert [slots.take(reply(0)), slots.is_waiting] == [None, False]
    assert sent(slots.again(lambda: 1)) == [(0, "c"), (1, "b")], "slot 0 has another adapter now"


def test_an_adapter_that_cannot_be_loaded_is_forgotten() -> None:
    slots = AdapterSlots(2)
    slots.load(9, 0, Memory("a"), [])  # type: ignore[arg-type]
    assert sent(slots.due({})) == [(0, "a")]
    assert slots.take(reply(0, "no memory", seq=9)) is None
    assert slots.take(reply(0, seq=9)) == AdapterAnswered(9, "no memory")
    assert slots.again(lambda: 1) == []


def test_new_agents_that_cannot_load_an_adapter_are_lost() -> None:
    slots = AdapterSlots(1)
    slots.keep(0, Memory("a"))  # type: ignore[arg-type]
    slots.again(lambda: 1)
    with pytest.raises(AgentLostError, match="no memory"):
        slots.take(reply(0, "no memory"))


@pytest.mark.parametrize("error", ["", "no memory"])
def test_late_replies_for_an_adapter_that_was_given_up_do_not_count_for_the_next_one(error: str) -> None:
    slots = AdapterSlots(2)
    slots.load(4, 1, Memory("a"), [])  # type: ignore[arg-type]
    assert sent(slots.due({})) == [(1, "a")]
    assert slots.take(reply(1, seq=4)) is None
    slots.drop(1)
    slots.load(5, 1, Memory("b"), [])  # type: ignore[arg-type]
    assert slots.due({}) == [], "agents load one adapter at a time"
    assert slots.take(reply(1, error, seq=4)) is None
    assert sent(slots.due({})) == [(1, "b")]
    assert slots.take(reply(1, seq=5)) is None
    assert slots.take(reply(1, seq=5)) == AdapterAnswered(5)


def test_an_adapter_that_is_given_up_before_it_was_sent_is_not_sent() -> None:
    slots = AdapterSlots(1)
    slots.load(4, 1, Memory("a"), [7])  # type: ignore[arg-type]
    slots.drop(1)
    assert not slots.is_loading
    assert slots.due({}) == []


def test_new_agents_that_cannot_load_a_dropped_adapter_stay() -> None:
    slots = AdapterSlots(1)
    slots.keep(0, Memory("a"))  # type: ignore[arg-type]
    assert sent(slots.again(lambda: 1)) == [(0, "a")]
    slots.drop(0)
    slots.keep(0, Memory("b"))  # type: ignore[arg-type]
    assert slots.take(reply(0, "no such file")) is None
    assert sent(slots.again(lambda: 1)) == [(0, "b")]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_memory_of_an_unloaded_adapter_is_freed_while_the_agents_live(is_replaced: bool) -> None:
    slots, memory = AdapterSlots(1), Memory("a")
    is_alive = weakref.ref(memory)
    slots.keep(0, memory)  # type: ignore[arg-type]
    del memory
    assert sent(slots.again(lambda: 1)) == [(0, "a")]
    assert slots.take(reply(0)) is None
    if is_replaced:
        slots.load(2, 0, Memory("b"), [])  # type: ignore[arg-type]
    else:
        slots.drop(0)
    assert is_alive() is None
