"""Serves recorded requests again under other settings, with the real scheduler on a virtual clock.

Requests arrive at their recorded times. A request that was completed ends after its recorded number of tokens. A client
that disconnected disconnects again after the same number of tokens. Step times come from a fit to the recorded steps
(``performance.simulation.fit``). The simulated run is also recorded, so that all tools for recordings can show it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llm_serving.errors import LLMServingError
from llm_serving.flight.facts import make_request
from llm_serving.flight.format import FlightRecordingError
from llm_serving.flight.history import Arrival, arrivals
from llm_serving.flight.pseudonyms import ENDING_TOKEN, PLAIN_TOKEN
from llm_serving.flight.reader import Completed, Scheduled, Stretch, read_recording
from llm_serving.flight.setup import limits_from_map, limits_to_map, record
from llm_serving.flight.steps import RecordedStep
from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import MoveKind, RequestUpdate, ScheduledStep
from llm_serving.scheduler.scheduler import Scheduler
from performance.simulation.agent import VirtualAgent
from performance.simulation.device import CostModel
from performance.simulation.fit import FittedDevice, MeasuredStep, StepFit, fit_steps
from performance.simulation.work import StepWork

__all__ = ["DeviceModel", "changed_limits", "fit_device", "what_if"]

_RING_BYTES = 1 << 33
"""Maximum size of the recording of a simulated run, in bytes. It is large, so that no old segment is overwritten."""


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A model of the recorded device: how long its steps and its transfers take."""

    fit: StepFit
    latency_s: float
    """Median seconds to transfer a step to the agent and its result back.

    The time in which the step waits in the agent's queue or runs is not included.
    """

    @property
    def device(self) -> CostModel:
        return FittedDevice(self.fit)


def changed_limits(values: dict[str, Any], changes: Sequence[str]) -> SchedulerLimits:
    """Returns the recorded limits with changes of the form ``name=value`` or ``scheduler_config.name=value``.

    Raises FlightRecordingError for an unknown name or an invalid value.
    """
    limits = limits_from_map(values)
    known = {declared.name for declared in fields(limits)}
    changed = limits_to_map(limits)
    for change in changes:
        key, equals, text = change.partition("=")
        name = key.rpartition(".")[2]
        if not equals or name not in known:
            raise FlightRecordingError(f"--set {change}: give KEY=VALUE, KEY one of {', '.join(sorted(known))}")
        changed[name] = _value(text)
    return limits_from_map(changed)


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def fit_device(stretch: Stretch) -> DeviceModel:
    """Fits a model to the step times of a recording. Raises UsageError if the recording has too few steps."""
    sent: dict[int, tuple[float, RecordedStep]] = {}
    steps, latencies = [], []
    for event in stretch.events():
        if isinstance(event, Scheduled) and event.step is not None:
            sent[event.step.seq] = (event.now, event.step)
        elif isinstance(event, Completed) and event.seq in sent and event.fault is None:
            scheduled, step = sent.pop(event.seq)
            busy_us = event.graph_us + event.sample_us
            steps.append(_measured(step, busy_us / 1e6))
            latencies.append(max(event.now - scheduled - (event.queue_us + busy_us) / 1e6, 0.0))
    return DeviceModel(fit_steps(steps, {"name": "recorded"}), statistics.median(latencies) if latencies else 0.0)


def _measured(step: RecordedStep, seconds: float) -> MeasuredStep:
    copies = sum(move.kind is MoveKind.COPY for move in step.moves)
    pairs = sum(
        length * start + length * (length + 1) // 2 for start, length in zip(step.starts, step.query_lens, strict=True)
    )
    work = StepWork(step.kind, step.num_tokens, step.num_seqs, sum(step.do_sample), step.num_context_tokens, pairs)
    return MeasuredStep(work, seconds, len(step.moves) - copies, copies)


def what_if(stretch: Stretch, limits: SchedulerLimits, model: DeviceModel) -> Stretch:
    """Serves the requests of ``stretch`` under ``limits`` and returns the recording of that run."""
    with tempfile.TemporaryDirectory() as folder:
        _VirtualRun(arrivals(stretch), limits, model, Path(folder)).run()
        (served,) = read_recording(Path(folder))
    return served


class _VirtualRun:
    """Simulates the engine's loop with recorded requests, on a virtual clock."""

    def __init__(self, wanted: list[Arrival], limits: SchedulerLimits, model: DeviceModel, folder: Path) -> None:
        self._recorder = record(Scheduler(limits), folder, _RING_BYTES, on_error=_fail)
        self._agent = VirtualAgent(model.device, limits.policy.value, self._sample)
        self._back_s = model.latency_s
        self._arriving = deque(sorted(wanted, key=_arrival_time))
        self._wanted = {arrival.facts["request_id"]: arrival for arrival in wanted}
        self._leaving: deque[tuple[float, str]] = deque(
            sorted(
                (arrival.end_time, arrival.facts["request_id"])
                for arrival in wanted
                if arrival.end == "abort" and not arrival.token_times and arrival.end_time is not None
            )
        )
        self._num_in_flight = 0

    def run(self) -> None:
        now = 0.0
        while (wake := self._next_event(now)) is not None:
            now = max(now, wake)
            self._iterate(now)
        if not self._recorder.is_idle:
            raise AssertionError("the scheduler has requests but schedules no step")
        self._recorder.close()

    def _next_event(self, now: float) -> float | None:
        result_time = self._agent.next_result()
        times = [
            None if result_time is None else result_time + self._back_s,
            _arrival_time(self._arriving[0]) if self._arriving else None,
            self._leaving[0][0] if self._leaving else None,
            self._recorder.next_wakeup(now),
        ]
        return min((time for time in times if time is not None), default=None)

    def _iterate(self, now: float) -> None:
        while self._arriving and _arrival_time(self._arriving[0]) <= now:
            self._add(self._arriving.popleft())
        while self._leaving and self._leaving[0][0] <= now:
            self._recorder.finish_request(self._leaving.popleft()[1], FinishReason.ABORT, now)
        for _, result in self._agent.run_until(now - self._back_s):
            self._num_in_flight -= 1
            for update in self._recorder.update(result, now):
                self._maybe_leave(update, now)
        while self._num_in_flight < NUM_SLOTS and (step := self._recorder.schedule(now)) is not None:
            self._num_in_flight += 1
            self._agent.submit(step, now)
        self._recorder.take_ended()

    def _add(self, arrival: Arrival) -> None:
        try:
            request = make_request(arrival.facts, arrival.prompt)
            # If the request ran on another replica before, the recording has times of that replica. Remove them.
            request.first_scheduled_time = request.first_token_time = None
            request.num_losses = request.alone_until = 0
            self._recorder.add_request(request)
        except LLMServingError:
            return  # the recorder has already recorded the refusal

    def _maybe_leave(self, update: RequestUpdate, now: float) -> None:
        """Aborts a request when it has as many tokens as it had when its recorded client disconnected."""
        request = update.request
        arrival = self._wanted[request.request_id]
        if arrival.end == "abort" and len(request.output_token_ids) >= arrival.num_output_tokens:
            self._recorder.finish_request(request.request_id, FinishReason.ABORT, now)

    def _sample(self, step: ScheduledStep) -> list[int]:
        positions = zip(step.requests, step.sample_positions, step.do_sample, strict=True)
        return [self._token(request, position) if samples else -1 for request, position, samples in positions]

    def _token(self, request: Request, position: int) -> int:
        arrival = self._wanted[request.request_id]
        if arrival.end == "stop" and position + 1 >= arrival.num_output_tokens:
            return ENDING_TOKEN
        return arrival.names[position] if position < len(arrival.names) else PLAIN_TOKEN


def _arrival_time(arrival: Arrival) -> float:
    return float(arrival.facts["arrival_time"])


def _fail(message: str) -> None:
    raise AssertionError(message)
