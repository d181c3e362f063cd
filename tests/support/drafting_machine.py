"""Serves requests with a draft model on a virtual clock. Engine, scheduler and speculator are real, times are given."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_serving.engine.commands import Add
from llm_serving.engine.core import EngineCore
from llm_serving.executor.base import ExecutorEvent
from llm_serving.ipc.drafts import REJECTED, rejected_entries
from llm_serving.request import Request
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.speculation.setup import MakeSpeculator
from llm_serving.speculation.speculator import Speculator
from support.fakes import FakeDetokenizer, FakeExecutor, RecordingLog, RecordingMetrics, make_limits, make_request

MAX_DRAFTS, MAX_ENTRIES = 4, 16


@dataclass(frozen=True)
class Times:
    """The times of the machine, in seconds."""

    step: float = 0.010
    """A decode step of one entry."""
    entry: float = 0.0005
    """One more entry of a decode step, or one more token of a prompt."""
    host: float = 0.0005
    """The host's time between a result and the next step."""
    draft_pass: float = 0.004
    """A pass of the draft model."""
    missed: float = 0.0004
    """One token that the draft model has missed."""


@dataclass(frozen=True)
class Client:
    """A client that sends requests one after the other. Each request is a pair: a prompt and the output."""

    requests: Sequence[tuple[list[int], list[int]]]


def new_text(seed: int, num_prompt: int, num_output: int) -> tuple[list[int], list[int]]:
    """Returns a prompt and an output without any pair of tokens twice, so earlier tokens give no drafts."""
    draw = random.Random(seed)
    tokens = draw.sample(range(2, 5000), num_prompt + num_output)
    return tokens[:num_prompt], tokens[num_prompt:]


def copied_text(seed: int, num_prompt: int, num_output: int) -> tuple[list[int], list[int]]:
    """Returns a prompt, and an output that begins with new tokens and then repeats the prompt."""
    prompt, output = new_text(seed, num_prompt, num_output)
    num_new = num_output // 4
    return prompt, output[:num_new] + (prompt * num_output)[: num_output - num_new]


class Machine(FakeExecutor):
    """Runs the steps of an agent with a draft model, one after the other, on a virtual clock.

    The draft model is right in the fraction ``right`` of its drafts, by lot.
    """

    def __init__(self, times: Times, right: Callable[[float], float]) -> None:
        super().__init__(make_limits())
        self.now = 0.0
        self.texts: dict[str, list[int]] = {}
        """The output of each request."""
        self.num_passes = 0
        self.num_drafts = 0
        """Number of drafts that steps verified."""
        self._times, self._right, self._lot = times, right, random.Random(1)
        self._sent: deque[tuple[ScheduledStep, float]] = deque()
        self._free_at = 0.0
        self._num_computed: dict[str, int] = {}

    @property
    def num_free_slots(self) -> int:
        return 4 - len(self._sent)

    def submit(self, step: ScheduledStep) -> None:
        self._sent.append((step, self.now + self._times.host))

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        if self._events:
            return [self._events.popleft()]
        if not self._sent:
            return []
        step, sent = self._sent.popleft()
        began = max(self._free_at, sent)
        result = StepResult(step.seq, [-1] * step.num_seqs, [0.0] * step.num_seqs, [0.0] * step.num_seqs)
        self._sample(step, result.sampled_ids)
        step_s = self._times.step + self._times.entry * (step.num_tokens - 1)
        draft_s = 0.0
        if step.num_wanted:
            result.drafts, draft_s = self._draft(step, result.sampled_ids)
        result.queue_us, result.graph_us = round(1e6 * (began - sent)), round(1e6 * step_s)
        result.sample_us = result.draft_us = round(1e6 * draft_s)
        self.num_drafts += step.num_drafts
        self._free_at = began + step_s + draft_s
        self.now = max(self.now, self._free_at)
        return [result]

    def _sample(self, step: ScheduledStep, sampled_ids: list[int]) -> None:
        for index, request in enumerate(step.requests):
            if step.do_sample[index]:
                sampled_ids[index] = self.texts[request.request_id][step.sample_positions[index]]
        if step.num_drafts:
            for index in rejected_entries(step.rows, step.token_ids, sampled_ids):
                sampled_ids[index] = REJECTED

    def _draft(self, step: ScheduledStep, sampled_ids: list[int]) -> tuple[list[list[int]], float]:
        """Returns the drafts for each sequence of a step, and the time of the draft model."""
        num_missed, drafts = 0, []
        for index, request in enumerate(step.requests):
            name, text = request.request_id, self.texts[request.request_id]
            known = step.sample_positions[index] + 1
            end = len(request.prompt_token_ids) + known
            if sampled_ids[index] != REJECTED:
                num_missed += max(0, end - self._num_computed.get(name, 0))
                self._num_computed[name] = max(end, self._num_computed.get(name, 0))
            guesses = text[known : known + step.num_wanted]
            drafts.append([token if self._is_right() else 1 for token in guesses])
        self.num_passes += step.num_wanted
        missed_s = self._times.missed * max(0, num_missed - len(set(step.rows)))
        return drafts, step.num_wanted * self._times.draft_pass + missed_s

    def _is_right(self) -> bool:
        return self._lot.random() < self._right(self.now)


def serve(
    clients: Sequence[Client],
    times: Times = Times(),
    right: float | Callable[[float], float] = 0.0,
    make_speculator: MakeSpeculator | None = None,
    **limits: object,
) -> Machine:
    """Serves all requests of the clients. Checks the tokens of each request. Returns the machine, whose ``now`` is the
    time that the requests took.
    """
    machine = Machine(times, right if callable(right) else lambda now: right)
    scheduler = Scheduler(
        make_limits(
            **{
                "num_blocks": 400,
                "block_size": 16,
                "max_model_len": 1024,
                "max_prompt_len": 600,
                "max_num_batched_tokens": 600,
                "decode_batch_size": MAX_ENTRIES,
                "max_num_seqs": MAX_ENTRIES,
                "decode_steps_ahead": 1,
                **limits,
            }
        )
    )
    core = EngineCore(
        scheduler,
        [(scheduler, machine)],
        FakeDetokenizer,
        RecordingLog(),
        RecordingMetrics(),
        lambda outputs: None,
        state_interval_s=1e9,
        clock=lambda: machine.now,
        make_speculator=make_speculator,
    )
    waiting = [deque(enumerate(client.requests)) for client in clients]
    running: dict[int, Request] = {}
    while any(waiting) or running:
        for number, left in enumerate(waiting):
            if number in running and running[number].is_finished:
                done = running.pop(number)
                assert done.output_token_ids == machine.texts.pop(done.request_id)
            if left and number not in running:
                place, (prompt, output) = left.popleft()
                request = make_request(f"c{number} {place}", prompt, len(output), arrival=machine.now)
                machine.texts[request.request_id] = output
                running[number] = request
                core.submit(Add(request))
        core.step()
    return machine


def with_model(always: bool = False) -> MakeSpeculator:
    """Returns a function that makes a speculator with a draft model."""
    return lambda replica, prepare: Speculator(MAX_DRAFTS, MAX_ENTRIES, prepare, always=always, has_model=True)


def without_model() -> MakeSpeculator:
    """Returns a function that makes a speculator whose drafts come from earlier tokens only."""
    return lambda replica, prepare: Speculator(MAX_DRAFTS, MAX_ENTRIES, prepare)
