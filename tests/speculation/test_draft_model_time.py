"""Tests that a draft model never makes serving slower. A virtual clock measures the time, so no machine matters.

Engine, scheduler and speculator are real. The times of steps and of the draft model are given.
"""

from __future__ import annotations

import itertools

import pytest

from llm_serving.engine.commands import UseStores
from llm_serving.engine.core import EngineCore
from llm_serving.executor.base import ExecutorEvent
from support.drafting_machine import Client, Machine, Times, copied_text, new_text, serve, with_model, without_model
from support.sweeps import with_sweeps

NUM_REQUESTS = 30
"""Number of requests of each client. They have about 3600 output tokens."""
MAX_SLOWER = 1.02
"""Limit of the time with a draft model, divided by the time without."""


def length(client: int, number: int) -> int:
    """Returns the number of output tokens of a request. All clients have others, so they begin at different times."""
    return 80 + (37 * number + 61 * client) % 80


def chats(count: int) -> list[Client]:
    return [
        Client([new_text(100 * client + each, 40, length(client, each)) for each in range(NUM_REQUESTS)])
        for client in range(count)
    ]


def copies(count: int) -> list[Client]:
    return [
        Client([copied_text(100 * client + each, 130, length(client, each)) for each in range(NUM_REQUESTS)])
        for client in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "right", "pass_ms"),
    with_sweeps(
        [(count, right, pass_ms) for count in (1, 4) for right in (0.0, 0.3, 0.45, 0.6) for pass_ms in (1.0, 4.0, 9.0)],
        lambda count, right, pass_ms: (count, right, pass_ms) not in ((1, 0.0, 4.0), (4, 0.45, 4.0)),
    ),
)
def test_a_draft_model_makes_chat_no_slower(count: int, right: float, pass_ms: float) -> None:
    plain = serve(chats(count))
    drafting = serve(chats(count), Times(draft_pass=pass_ms / 1e3), right, with_model())
    assert drafting.num_passes > 0, "at least one trial"
    assert drafting.now <= MAX_SLOWER * plain.now


@pytest.mark.parametrize("count", with_sweeps([(1,), (4,)], lambda count: count > 1))
def test_a_draft_model_does_not_compute_where_earlier_tokens_give_drafts(count: int) -> None:
    """Most of the output repeats the prompt. The draft model is wrong, or slower than drafts from earlier tokens."""
    plain = serve(copies(count))
    from_text = serve(copies(count), make_speculator=without_model())
    assert from_text.now < 0.7 * plain.now
    for right in (0.0, 0.5):
        assert serve(copies(count), right=right, make_speculator=with_model()).now <= MAX_SLOWER * from_text.now


@pytest.mark.parametrize(("count", "right", "gain"), [(1, 0.9, 1.35), (4, 0.95, 1.15)])
def test_a_good_draft_model_makes_chat_faster(count: int, right: float, gain: float) -> None:
    plain = serve(chats(count))
    drafting = serve(chats(count), Times(draft_pass=0.003), right, with_model())
    assert drafting.now < plain.now / gain
    assert drafting.num_drafts > 1000


def test_a_good_draft_model_helps_where_earlier_tokens_give_no_drafts() -> None:
    from_text = serve(copies(1), make_speculator=without_model())
    assert serve(copies(1), Times(draft_pass=0.001), 1.0, with_model()).now < 0.98 * from_text.now


def test_a_draft_model_is_used_again_after_a_change_of_the_text() -> None:
    change_s = 40.0

    def right(now: float) -> float:
        return 0.95 * (now > change_s)

    clients = [Client(chats(1)[0].requests + chats(2)[1].requests + chats(3)[2].requests)]
    plain = serve(clients)
    drafting = serve(clients, Times(draft_pass=0.002), right, with_model())
    assert drafting.now < plain.now - 0.2 * (plain.now - change_s)


def passes_per_draft(machine: Machine) -> float:
    return machine.num_passes / max(1, machine.num_drafts)


def test_drafts_are_verified_by_the_next_step() -> None:
    """Without the wait, the step after a plain step is sent ahead. Then all drafts of a step are lost."""
    drafting = serve(chats(1), Times(draft_pass=0.0005), 1.0, with_model())
    assert passes_per_draft(drafting) < 1.1


def test_a_command_during_a_held_step_sends_no_step_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands such as the start of a profile wake the engine while a step runs, whose drafts the next step verifies.
    """
    poll, step = Machine.poll, EngineCore.step
    calls = itertools.count()

    def without_result(self: Machine, timeout_s: float | None) -> list[ExecutorEvent]:
        return [] if next(calls) % 2 else poll(self, timeout_s)

    def with_command(self: EngineCore) -> None:
        self.submit(UseStores(lambda stores: None))
        step(self)

    monkeypatch.setattr(Machine, "poll", without_result)
    monkeypatch.setattr(EngineCore, "step", with_command)
    drafting = serve(chats(1), Times(draft_pass=0.0005), 1.0, with_model())
    assert drafting.num_drafts > 100
    assert passes_per_draft(drafting) < 1.1


def test_requests_whose_drafts_are_not_computed_get_no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent makes no drafts for a request behind a cached prefix that its draft model has not computed."""
    draft = Machine._draft

    def none(self: Machine, *arguments: object) -> tuple[list[list[int]], float]:
        drafts, seconds = draft(self, *arguments)  # type: ignore[arg-type]
        return [[] for _ in drafts], seconds

    monkeypatch.setattr(Machine, "_draft", none)
    drafting = serve(chats(1), right=1.0, make_speculator=with_model())
    assert drafting.num_passes <= 2 * NUM_REQUESTS
