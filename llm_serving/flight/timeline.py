"""Builds a timeline from recorded events: steps on the device, phases of requests, counts of the scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llm_serving.flight.reader import (
    Added,
    AgentLost,
    Completed,
    Event,
    FailedAll,
    Finished,
    Scheduled,
    Stretch,
    TookEnded,
)
from llm_serving.flight.steps import RecordedStep
from llm_serving.scheduler.output import StepKind

__all__ = ["Counts", "DeviceStep", "Lane", "Span", "SpanPhase", "Timeline", "build_timeline"]


class SpanPhase(enum.IntEnum):
    """The phases of a request that the timeline distinguishes."""

    UNDER_WAY = 0
    """The request arrived before the recording, and no event has mentioned it yet."""
    QUEUED = 1
    PREFILL = 2
    DECODE = 3
    PREEMPTED = 4
    SWAPPED = 5
    RESTARTED = 6
    """The request waits, because its agent failed and the computed tokens were lost."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a request, with begin and end in seconds of the engine's clock."""

    phase: SpanPhase
    begin: float
    end: float


@dataclass(slots=True)
class Lane:
    """The part of a timeline that belongs to one request."""

    number: int
    request_id: str
    arrival: float
    num_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    num_output_tokens: int = 0
    end: str = ""
    """The outcome of the request (finish reason, error, refusal). Empty if the request has not ended."""
    spans: list[Span] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Indices, in the timeline's list of steps, of the steps that contain the request."""
    phase: SpanPhase | None = None
    since: float = 0.0

    def enter(self, phase: SpanPhase | None, now: float) -> None:
        """Ends the request's current phase at ``now`` and starts ``phase`` (None: the request has ended)."""
        if self.phase is not None and now > self.since:
            self.spans.append(Span(self.phase, self.since, now))
        self.phase, self.since = phase, max(now, self.since)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step with its start and end on the device, in seconds of the engine's clock. The end is the time at which the
    result arrived. The start is the end minus the time that the step spent in the graph and in the sampler.
    """

    step: RecordedStep
    scheduled: float
    begin: float
    end: float
    fault: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of running requests, waiting requests and free blocks at one moment."""

    time: float
    running: int
    waiting: int
    free_blocks: int


@dataclass(slots=True)
class Timeline:
    """Steps, requests and counts of a recording. ``begin`` and ``end`` are the times of the first and last event."""

    begin: float
    end: float
    steps: list[DeviceStep]
    lanes: list[Lane]
    counts: list[Counts]


def build_timeline(stretch: Stretch) -> Timeline:
    """Builds the timeline of ``stretch``, a part of a recording without gaps."""
    header = stretch.header
    builder = _Builder(header.limits["max_model_len"])
    for request_id, number in header.numbers.items():
        lane = builder.lanes[number] = Lane(number, request_id, header.engine_time)
        lane.phase, lane.since = SpanPhase.UNDER_WAY, header.engine_time
    for event in stretch.events():
        builder.take(event)
    return builder.timeline()


class _Builder:
    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.lanes: dict[int, Lane] = {}
        self._steps: list[DeviceStep] = []
        self._counts: list[Counts] = []
        self._sent: dict[int, tuple[float, RecordedStep]] = {}
        self._times: list[float] = []

    def timeline(self) -> Timeline:
        begin = min([*self._times, *(lane.arrival for lane in self.lanes.values())], default=0.0)
        end = max(self._times, default=begin)
        for lane in self.lanes.values():
            lane.enter(None, end)
        lanes = sorted(self.lanes.values(), key=lambda lane: (lane.arrival, lane.number))
        return Timeline(begin, end, self._steps, lanes, self._counts)

    def take(self, event: Event) -> None:
        if not isinstance(event, Added):
            self._times.append(event.now)
        if isinstance(event, Added):
            self._add(event)
        elif isinstance(event, Scheduled):
            self._schedule(event)
        elif isinstance(event, Completed):
            self._complete(event)
        elif isinstance(event, Finished) and event.was_there and event.number is not None:
            self._finish(event.number, event.reason.lower(), event.now)
        elif isinstance(event, TookEnded):
            for number in event.numbers:
                self._finish(number, "deadline", event.now)
        elif isinstance(event, FailedAll):
            for number, lane in self.lanes.items():
                if lane.phase is not None:
                    self._finish(number, "error", event.now)
        elif isinstance(event, AgentLost):
            self._lose(event.now)

    def _add(self, event: Added) -> None:
        facts = event.facts
        length = facts["num_prompt_tokens"]
        lane = Lane(event.number, facts["request_id"], facts["arrival_time"], length)
        lane.max_output_tokens = min(facts["max_tokens"], self._max_model_len - length)
        self.lanes[event.number] = lane
        if event.refusal is not None:
            lane.end = f"refused: {event.refusal}"
            return
        lane.phase, lane.since = SpanPhase.QUEUED, lane.arrival

    def _schedule(self, event: Scheduled) -> None:
        if event.state is not None:
            running, waiting, free_blocks = event.state[:3]
            counts = Counts(event.now, running, waiting, free_blocks)
            if not self._counts or self._counts[-1].time != event.now:
                self._counts.append(counts)
            else:
                self._counts[-1] = counts
        step = event.step
        if step is None:
            return
        self._sent[step.seq] = (event.now, step)
        restarted = set(step.restarts)
        for index, number in enumerate(step.numbers):
            lane = self.lanes[number]
            if lane.phase is SpanPhase.QUEUED:
                lane.enter(SpanPhase.PREFILL, event.now)
            elif index in restarted and lane.phase in (SpanPhase.PREFILL, SpanPhase.DECODE, SpanPhase.UNDER_WAY):
                swapped = step.kind is StepKind.DECODE
                self._lose_blocks(lane, SpanPhase.SWAPPED if swapped else SpanPhase.PREEMPTED, event.now)

    def _lose_blocks(self, lane: Lane, phase: SpanPhase, now: float) -> None:
        """Adds the phase in which a preempted request had no blocks. The phase lasts from the request's last step to
        its restart at ``now``.
        """
        last = self._steps[lane.steps[-1]].end if lane.steps else lane.since
        lane.enter(phase, min(max(last, lane.since), now))

    def _complete(self, event: Completed) -> None:
        scheduled, step = self._sent.pop(event.seq, (event.now, None))
        if step is None:
            return
        begin = max(event.now - (event.graph_us + event.sample_us) / 1e6, scheduled)
        fault = "" if event.fault is None else ("dropped" if event.fault[0] else "failed")
        self._steps.append(DeviceStep(step, scheduled, begin, event.now, fault))
        for index, number in enumerate(step.numbers):
            lane = self.lanes[number]
            lane.steps.append(len(self._steps) - 1)
            if lane.phase is None or fault == "dropped":
                continue
            if fault:
                self._finish(number, "error", event.now)
            elif step.do_sample[index]:
                self._token(lane, step.sample_positions[index], index in event.ends, event.now)

    def _token(self, lane: Lane, position: int, is_ending: bool, now: float) -> None:
        lane.num_output_tokens = max(lane.num_output_tokens, position + 1)
        if lane.phase is not SpanPhase.DECODE:
            lane.enter(SpanPhase.DECODE, now)
        if is_ending:
            self._finish(lane.number, "stop", now)
        elif lane.max_output_tokens is not None and position + 1 >= lane.max_output_tokens:
            self._finish(lane.number, "length", now)

    def _finish(self, number: int, end: str, now: float) -> None:
        lane = self.lanes[number]
        lane.end = lane.end or end
        lane.enter(None, now)

    def _lose(self, now: float) -> None:
        self._sent.clear()
        for lane in self.lanes.values():
            if lane.phase not in (None, SpanPhase.QUEUED):
                lane.enter(SpanPhase.RESTARTED, now)
