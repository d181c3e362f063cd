"""Reads flight recordings: segments into stretches, records into events.

    for stretch in read_recording(Path("output/flight")):
        for event in stretch.events():
            ...

``step_timings`` is what a cost model of the device is fitted to, ``arrivals`` a load to run again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_serving.flight.format import SUFFIX, FlightRecordingError, FrameReader, SegmentHeader, Tag
from llm_serving.flight.steps import RecordedStep, StepReader
from llm_serving.scheduler.output import StepKind

__all__ = [
    "Added",
    "AgentLost",
    "Answered",
    "Arrival",
    "Event",
    "FailedAll",
    "Finished",
    "Raised",
    "Scheduled",
    "Segment",
    "StepTiming",
    "Stretch",
    "TookEnded",
    "VoidSteps",
    "arrivals",
    "read_recording",
    "step_timings",
]


@dataclass(frozen=True, slots=True)
class Added:
    """``add_request``. ``refusal``: the error it raised."""

    now: float
    """The engine's time of the last call that had one."""
    number: int
    facts: dict[str, Any]
    """See ``llm_serving.flight.facts.request_facts``."""
    prompt: list[int] | None
    """Pseudonyms of the prompt's tokens."""
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """``schedule``: a step, or None and when to look again."""

    now: float
    step: RecordedStep | None
    wakeup: float | None
    state: list[int]
    """Counts of the scheduler afterwards, see ``llm_serving.flight.recorder.STATE_NAMES``."""


@dataclass(frozen=True, slots=True)
class Answered:
    """``update`` with the answer to a step."""

    now: float
    seq: int
    fault: list[Any] | None
    ends: list[int]
    """Sequences of the step whose token was an ending one."""
    names: list[int] | None
    """Pseudonyms of the sampled tokens."""
    queue_us: int
    graph_us: int
    sample_us: int
    outcome: int | str
    """Updates that it gave, or what it raised."""
    state: list[int]


@dataclass(frozen=True, slots=True)
class Finished:
    """``finish_request`` or ``abort_request``. ``number`` is None for an unknown id."""

    now: float
    number: int | None
    reason: str
    was_there: bool


@dataclass(frozen=True, slots=True)
class AgentLost:
    """``agent_lost``."""

    now: float
    state: list[int]


@dataclass(frozen=True, slots=True)
class FailedAll:
    """``fail_all``."""

    now: float
    num_ended: int
    state: list[int]


@dataclass(frozen=True, slots=True)
class TookEnded:
    """``take_ended``: requests that ``schedule`` had ended."""

    now: float
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class VoidSteps:
    """``void_steps``."""

    now: float
    seqs: list[int]


@dataclass(frozen=True, slots=True)
class Raised:
    """A call in which the scheduler failed."""

    now: float
    call: Tag
    error: str


Event = Added | Scheduled | Answered | Finished | AgentLost | FailedAll | TookEnded | VoidSteps | Raised


@dataclass(slots=True)
class Segment:
    """One file."""

    file: Path
    header: SegmentHeader
    state: dict[str, Any]
    """``{"new": True}``, ``{"missing": why}``, or what ``llm_serving.flight.state`` reads."""
    records: list[list[Any]]
    is_torn: bool
    """The file ends in the middle of a frame: what came last is lost."""

    def events(self) -> Iterator[Event]:
        """What happened, in order."""
        now, steps = self.header.engine_time, StepReader()
        for record in self.records:
            if record[0] == Tag.TIME:
                now = record[1]
            else:
                yield _event(record, now, steps)


@dataclass(slots=True)
class Stretch:
    """Segments of one run that follow one another without a gap."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def header(self) -> SegmentHeader:
        return self.segments[0].header

    def events(self) -> Iterator[Event]:
        for segment in self.segments:
            yield from segment.events()


def read_recording(path: Path) -> list[Stretch]:
    """The stretches of a segment file or of a folder of them, the oldest first.

    Raises FlightRecordingError when there is none or a file is none of ours.
    """
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise FlightRecordingError(f"{path}: no flight recording (no such file, or a folder without *{SUFFIX})")
    segments = [segment for file in files if (segment := _read_segment(file)) is not None]
    if not segments:
        raise FlightRecordingError(f"{path}: its segments are empty: their first frames are torn")
    segments.sort(key=lambda segment: (segment.header.unix_time, segment.header.index))
    stretches: list[Stretch] = []
    last: Segment | None = None
    for segment in segments:
        if last is None or not _follows(segment, last):
            stretches.append(Stretch())
        stretches[-1].segments.append(segment)
        last = segment
    return stretches


def _follows(segment: Segment, last: Segment) -> bool:
    here, before = segment.header, last.header
    return here.run == before.run and here.index == before.index + 1 and not last.is_torn and not here.after_gap


def _read_segment(file: Path) -> Segment | None:
    data = file.read_bytes()
    frames = FrameReader(data, file)
    try:
        header, state = SegmentHeader.from_map(next(frames), file), next(frames)
    except StopIteration:
        return None
    records = [record for frame in frames for record in frame]
    return Segment(file, header, state, records, frames.is_torn)


def _event(record: list[Any], now: float, steps: StepReader) -> Event:
    tag, fields = Tag(record[0]), record[1:]
    if tag is Tag.ADD:
        number, facts, names, refusal = fields
        prompt = None if names is None else array("i", names).tolist()
        return Added(now, number, facts, prompt, refusal)
    if tag is Tag.SCHEDULE:
        step, wakeup, state = fields
        return Scheduled(now, None if step is None else steps.step(step), wakeup, state)
    if tag is Tag.UPDATE:
        return Answered(now, *fields)
    if tag is Tag.FINISH:
        return Finished(now, *fields)
    if tag is Tag.AGENT_LOST:
        return AgentLost(now, *fields)
    if tag is Tag.FAIL_ALL:
        return FailedAll(now, *fields)
    if tag is Tag.TAKE_ENDED:
        return TookEnded(now, *fields)
    if tag is Tag.VOID_STEPS:
        return VoidSteps(now, *fields)
    return Raised(now, Tag(fields[0]), fields[1])


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What a step had to do and how long the device took for it. Times are seconds, on the engine's clock."""

    seq: int
    kind: StepKind
    num_seqs: int
    num_tokens: int
    num_prompt_tokens: int
    """Tokens in sequences with more than one in this step."""
    num_context_tokens: int
    """Keys and values that its attention reads: the contexts of its sequences."""
    num_moves: int
    scheduled: float
    answered: float
    queue_us: int
    graph_us: int
    sample_us: int


@dataclass(slots=True)
class Arrival:
    """A request as a load: when, how long, and what it became."""

    number: int
    facts: dict[str, Any]
    prompt: list[int] | None
    refusal: str | None
    num_output_tokens: int = 0
    """Tokens that it was seen to get."""
    end: str | None = None
    """``stop``, ``length``, ``abort`` or ``error``; None when it had not ended."""
    end_time: float | None = None
    first_token_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """Pseudonyms of its output tokens, where they were recorded."""


def step_timings(stretch: Stretch) -> list[StepTiming]:
    """The steps that ran without fault, in the order of their answers."""
    sent: dict[int, tuple[float, RecordedStep]] = {}
    timings = []
    for event in stretch.events():
        if isinstance(event, Scheduled) and event.step is not None:
            sent[event.step.seq] = (event.now, event.step)
        elif isinstance(event, AgentLost):
            sent.clear()
        elif isinstance(event, Answered) and event.seq in sent:
            scheduled, step = sent.pop(event.seq)
            if event.fault is None:
                timings.append(_timing(step, scheduled, event))
    return timings


def _timing(step: RecordedStep, scheduled: float, answer: Answered) -> StepTiming:
    return StepTiming(
        seq=step.seq,
        kind=step.kind,
        num_seqs=step.num_seqs,
        num_tokens=step.num_tokens,
        num_prompt_tokens=sum(length for length in step.query_lens if length > 1),
        num_context_tokens=step.num_context_tokens,
        num_moves=len(step.moves),
        scheduled=scheduled,
        answered=answer.now,
        queue_us=answer.queue_us,
        graph_us=answer.graph_us,
        sample_us=answer.sample_us,
    )


def arrivals(stretch: Stretch) -> list[Arrival]:
    """The requests that came in a stretch, in order, with what was recorded of their ends.

    Requests that were there before it began are not among them.
    """
    return _Arrivals().of(stretch)


class _Arrivals:
    """Follows tokens and ends through a stretch, as the scheduler counts them."""

    def __init__(self) -> None:
        self._found: dict[int, Arrival] = {}
        self._sent: dict[int, RecordedStep] = {}
        self._max_model_len = 0

    def of(self, stretch: Stretch) -> list[Arrival]:
        self._max_model_len = stretch.header.limits["max_model_len"]
        for event in stretch.events():
            if isinstance(event, Added):
                self._found[event.number] = Arrival(event.number, event.facts, event.prompt, event.refusal)
            elif isinstance(event, Scheduled) and event.step is not None:
                self._sent[event.step.seq] = event.step
            elif isinstance(event, Answered) and event.seq in self._sent:
                self._take(self._sent.pop(event.seq), event)
            elif isinstance(event, Finished) and event.was_there and event.number in self._found:
                self._end(self._found[event.number], event.reason.lower(), event.now)
            elif isinstance(event, AgentLost):
                self._sent.clear()
            elif isinstance(event, FailedAll):
                for arrival in self._found.values():
                    self._end(arrival, "error", event.now)
        return list(self._found.values())

    def _take(self, step: RecordedStep, answer: Answered) -> None:
        failed = answer.fault is not None and not answer.fault[0]
        for index, number in enumerate(step.numbers):
            arrival = self._found.get(number)
            if arrival is None or arrival.end is not None:
                continue
            if failed:
                self._end(arrival, "error", answer.now)
            elif answer.fault is None and step.do_sample[index]:
                name = None if answer.names is None else answer.names[index]
                self._token(arrival, step.sample_positions[index], index in answer.ends, answer.now, name)

    def _token(self, arrival: Arrival, position: int, is_ending: bool, now: float, name: int | None) -> None:
        if position != arrival.num_output_tokens:  # of a step that was void: it is computed again
            return
        arrival.num_output_tokens += 1
        arrival.token_times.append(now)
        if name is not None:
            arrival.names.append(name)
        if arrival.first_token_time is None:
            arrival.first_token_time = now
        if is_ending:
            self._end(arrival, "stop", now)
        elif arrival.num_output_tokens >= min(
            arrival.facts["max_tokens"], self._max_model_len - arrival.facts["num_prompt_tokens"]
        ):
            self._end(arrival, "length", now)

    def _end(self, arrival: Arrival, end: str, now: float) -> None:
        if arrival.end is None and arrival.refusal is None:
            arrival.end, arrival.end_time = end, now
