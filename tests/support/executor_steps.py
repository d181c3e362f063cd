"""Helpers for tests with executors over stub agents. They make steps and wait for events."""

from __future__ import annotations

import os
import select
import time
from typing import Any, TypeVar

from llm_serving.executor.agent_executor import AgentExecutor
from llm_serving.executor.base import AgentLost, ExecutorEvent
from llm_serving.ipc.segment import SHM_DIRECTORY, SHM_PREFIX
from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from support.stub_agent import SLOW
from support.time_limits import time_limit

E = TypeVar("E", bound=ExecutorEvent)


def shm_entries() -> set[str]:
    """Returns the names of the shared-memory segments that this process has made."""
    return {name for name in os.listdir(SHM_DIRECTORY) if name.startswith(f"{SHM_PREFIX}{os.getpid()}x")}


def events_until(executor: AgentExecutor, kind: type[E], timeout_s: float = 20.0) -> list[ExecutorEvent]:
    """Polls until an event of this kind arrives. Returns all events up to this one."""
    deadline, events = time.monotonic() + time_limit(timeout_s), []
    while time.monotonic() < deadline:
        events += executor.poll(0.5)
        if any(isinstance(event, kind) for event in events):
            return events
    raise AssertionError(f"no {kind} within {timeout_s} s; got {events}")


def loss_by_event(executor: AgentExecutor, timeout_s: float = 60.0) -> AgentLost:
    """Returns the loss of a killed agent, which must be the next event.

    ``poll`` is only called while a source of the executor is readable. An executor that does not watch the end of its
    agents, but looks at them in ``poll``, does not notice the loss.
    """
    events: list[ExecutorEvent] = []
    while not events:
        readable, _, _ = select.select([executor], [], [], time_limit(timeout_s))
        assert readable, "no source of the executor became readable when the agent ended"
        events = executor.poll(0.0)
    [lost] = events
    assert isinstance(lost, AgentLost)
    return lost


def results(executor: AgentExecutor, count: int, timeout_s: float = 20.0) -> list[StepResult]:
    """Returns the next ``count`` results in order. Any other event fails the test."""
    found: list[StepResult] = []
    deadline = time.monotonic() + time_limit(timeout_s)
    while len(found) < count:
        assert time.monotonic() < deadline, found
        events = executor.poll(0.5)
        assert all(isinstance(event, StepResult) for event in events), events
        found += [event for event in events if isinstance(event, StepResult)]
    return found


def prefill(seq: int, token: int, row: int = 0, **sampling: Any) -> ScheduledStep:
    """Makes a prefill step with one prompt of one token."""
    return ScheduledStep(
        seq,
        StepKind.PREFILL,
        requests=[Request(f"r{seq}", [token], SamplingParams(**sampling), 0.0)],
        rows=[row],
        token_ids=[token],
        query_lens=[1],
        starts=[0],
        block_tables=[[1]],
        do_sample=[True],
        sample_positions=[0],
    )


def submit_decode_before_prefill(executor: AgentExecutor) -> None:
    """Submits three steps. Step 0 is running when steps 1 and 2 arrive.

    Step 1 is a decode and step 2 is a prefill. Both wait in this order, so the agent can change the order.
    """
    decode = prefill(1, 5)
    decode.kind = StepKind.DECODE
    executor.submit(prefill(0, SLOW))
    executor.submit(decode)
    executor.submit(prefill(2, 6, row=1))
