"""Fakes of the objects around scheduler and engine: executor, detokenizer, log and metrics.

Also has a function that makes requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_serving.executor.base import AdapterAnswered, AgentLost, AgentProfiled, AgentReady, AgentStatus, ExecutorEvent
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.request import FinishReason, Request, RequestOutput, RequestTimings
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepResult
from support.fake_device import END_TOKEN, VOCABULARY, FakeDevice, expected_samples, expected_tokens, next_token

__all__ = [
    "END_TOKEN",
    "VOCABULARY",
    "FakeDetokenizer",
    "FakeDevice",
    "FakeExecutor",
    "RecordingLog",
    "RecordingMetrics",
    "expected_samples",
    "expected_tokens",
    "make_limits",
    "make_request",
    "next_token",
]


def make_limits(**changes: Any) -> SchedulerLimits:
    """Returns small scheduler limits for tests. ``changes`` replace some of them."""
    values: dict[str, Any] = {
        "num_blocks": 33,
        "block_size": 4,
        "max_model_len": 64,
        "max_prompt_len": 48,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "prefill_batch_size": 2,
        "decode_batch_size": 8,
    }
    return SchedulerLimits(**{**values, **changes})


def make_request(
    name: str,
    prompt: int | Sequence[int] = 5,
    max_tokens: int = 8,
    *,
    arrival: float = 0.0,
    deadline: float | None = None,
    **sampling: Any,
) -> Request:
    """Makes a request. ``prompt`` is a list of tokens or a number of tokens, which are then derived from ``name``."""
    if isinstance(prompt, int):
        seed = sum(ord(letter) * 31**place for place, letter in enumerate(name))
        prompt = [2 + (seed + 7 * place) % (VOCABULARY - 2) for place in range(prompt)]
    sampling.setdefault("ignore_eos", True)
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(name, prompt, params, arrival, frozenset({END_TOKEN}), deadline=deadline)


class FakeExecutor:
    """Implements the Executor protocol over a FakeDevice: ``poll`` runs a step in the caller's thread.

    While ``hold`` is set, ``poll`` returns no result. Any thread may call any method.
    """

    def __init__(self, limits: SchedulerLimits, *, num_slots: int = 8, ready: bool = True) -> None:
        self.device = FakeDevice(limits)
        self.steps: list[ScheduledStep] = []
        self.submit_error: Exception | None = None
        self.aborted: list[int] = []
        self.masks: dict[int, list[Any]] = {}
        """The masks of each step that has some."""
        self.adapters: dict[int, str] = {}
        """The name of the shared memory of the adapter in each slot."""
        self.adapter_error = ""
        self._num_loads = 0
        self.releases = 0
        """Number of calls of ``release``."""
        self.polls = 0
        self.step_seconds = 0.0
        self.step_error: str | None = None
        self._num_slots = num_slots
        self._events: deque[ExecutorEvent] = deque([AgentReady({"device": "fake"})] if ready else [])
        self._changed = threading.Condition()
        self._woken = False
        self._held = False

    @property
    def num_free_slots(self) -> int:
        return self._num_slots - len(self.device.queue)

    def submit(self, step: ScheduledStep) -> None:
        if self.submit_error is not None:
            error, self.submit_error = self.submit_error, None
            raise error
        assert self.num_free_slots > 0
        with self._changed:
            self.steps.append(step)
            if not any(isinstance(event, AgentLost) for event in self._events):
                self.device.submit(step)  # if the agent is lost, the step is lost, too

    def abort(self, seq: int) -> None:
        with self._changed:
            self.aborted.append(seq)
            result = self.device.abort(seq)
            if result is not None:
                self._events.append(result)

    def distrust(self, check: str, reason: str, step: int | None = None) -> None:
        self.lose_agent(loss=AgentLost(reason, failed_check=check, step=step))

    def publish_masks(self, seq: int, masks: Sequence[Any]) -> None:
        self.masks[seq] = list(masks)

    def load_adapter(self, slot: int, memory: AdapterMemory) -> int:
        self.adapters[slot] = memory.name
        self._num_loads += 1
        self.push(AdapterAnswered(self._num_loads, self.adapter_error))
        return self._num_loads

    def drop_adapter(self, slot: int) -> None:
        self.adapters.pop(slot, None)

    def request_status(self) -> None:
        self.push(AgentStatus(self.agents()))

    def profile(self, folder: str | None) -> bool:
        self.push(AgentProfiled([{"rank": 0, "error": "", "folder": folder or ""}]))
        return True

    def release(self) -> None:
        self.releases += 1

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        with self._changed:
            self.polls += 1
            self._changed.wait_for(self._has_work, timeout_s)
            self._woken = False
            if not self._events and self.device.queue and not self._held:
                if self.step_seconds:
                    self._changed.wait(self.step_seconds)
                result = self.device.run_next()
                if self.step_error is not None:
                    result, self.step_error = StepResult(result.seq, error=self.step_error), None
                self._events.append(result)
            events = list(self._events)
            self._events.clear()
            for event in events:
                if isinstance(event, StepResult):
                    self.device.answered(event.seq)
            return events

    def fileno(self) -> int:
        raise AssertionError("a fake executor has no descriptor: several are waited for with a poll of the test's own")

    def next_due(self) -> float | None:
        return None

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def agents(self) -> list[dict[str, object]]:
        return [{"rank": 0, "state": "ready"}]

    def push(self, event: ExecutorEvent) -> None:
        """Makes the next ``poll`` return this event."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def lose_agent(self, *, final: bool = False, ready: bool = True, loss: AgentLost | None = None) -> None:
        """Kills the agent. A new agent is ready immediately, except if ``final`` is true or ``ready`` is false."""
        with self._changed:
            self._events = deque(event for event in self._events if not isinstance(event, StepResult))
            self.device.reset()
            self._events.append(loss or AgentLost("the fake agent was killed", final))
            if ready and not final:
                self._events.append(AgentReady())
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._woken or bool(self._events) or (bool(self.device.queue) and not self._held)


class FakeDetokenizer:
    """A fake of the incremental detokenizer, whose text has one letter for each token.

    It finds stop strings. It holds back only text that may become a stop string.
    """

    def __init__(self, request: Request) -> None:
        self._stop = request.sampling.stop
        self._include_stop = request.sampling.include_stop_str_in_output
        self._held = ""

    @staticmethod
    def letter(token_id: int) -> str:
        return chr(ord("A") + token_id)

    def append(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        self._held += "".join(self.letter(token) for token in token_ids)
        for stop in self._stop:
            place = self._held.find(stop)
            if place >= 0:
                text, self._held = self._held[: place + len(stop) * self._include_stop], ""
                return text, stop
        keep = max((k for s in self._stop for k in range(1, len(s)) if self._held.endswith(s[:k])), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


@dataclass
class RecordingLog:
    """An event log that keeps its lines."""

    lines: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        self.lines.append((name, fields))

    def info(self, message: str, /, *, event: str = "info", **fields: object) -> None:
        self.event(event, message=message, **fields)

    def warning(self, message: str, /, *, event: str = "warning", **fields: object) -> None:
        self.event(event, message=message, **fields)

    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None:
        self.event(event, message=message, **fields)

    def named(self, name: str) -> list[dict[str, object]]:
        return [fields for line, fields in self.lines if line == name]


@dataclass
class RecordingMetrics:
    """Metrics that record all calls."""

    steps: list[tuple[str, int, int]] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    ends: list[tuple[str, FinishReason]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    num_preemptions: int = 0
    num_swaps: int = 0
    met: list[dict[str, bool]] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    num_not_finite: int = 0
    checks: list[tuple[str, str]] = field(default_factory=list)

    def sequences_not_finite(self, count: int) -> None:
        self.num_not_finite += count

    def self_check(self, check: str, result: str) -> None:
        self.checks.append((check, result))

    def step(self, step: ScheduledStep, result: StepResult, seconds: float, detokenise_seconds: float) -> None:
        assert seconds >= 0
        assert detokenise_seconds >= 0
        assert result.seq == step.seq
        self.steps.append((step.kind.value, step.num_seqs, step.num_tokens))

    def first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def request_end(self, output: RequestOutput, reason: FinishReason, timings: RequestTimings) -> None:
        self.ends.append((output.request_id, reason))

    def host_overhead(self, seconds: float) -> None:
        assert seconds >= 0
        self.overheads.append(seconds)

    def request_refused(self, code: str) -> None:
        self.refusals.append(code)

    def preemptions(self, count: int, swaps: int) -> None:
        self.num_preemptions += count
        self.num_swaps += swaps

    def objectives(self, met: Mapping[str, bool]) -> None:
        self.met.append(dict(met))
