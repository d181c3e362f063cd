"""Reads flight recordings: turns the records of segments (files) into events, which are calls of the scheduler.

    for stretch in read_recording(Path("output/flight")):
        for event in stretch.events():
            ...

A stretch consists of segments of one run that follow each other without a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from llm_serving.flight.format import SUFFIX, FlightRecordingError, FrameReader, SegmentHeader, Tag, replica_folders
from llm_serving.flight.pseudonyms import PLAIN_TOKEN
from llm_serving.flight.steps import RecordedStep, StepReader


@dataclass(frozen=True, slots=True)
class Added:
    """A recorded call of ``Scheduler.add_request``, or of ``place_request`` if it has an ``arrival_index``."""

    now: float
    """Engine time of the call in seconds. If the call has no recorded time, the time of the latest call before it that
    has one.
    """
    number: int
    facts: dict[str, Any]
    """Lengths, times and parameters of the request: the map that ``facts.request_facts`` returned."""
    prompt: list[int] | None
    """Pseudonyms of the prompt's tokens, or None if the recording has none."""
    refusal: str | None
    """Name of the error that the call raised."""
    arrival_index: int | None = None
    output: list[int] | None = None
    """Pseudonyms of the output tokens that the request already had, or zeros if the recording has no pseudonyms."""
    hands_over: bool = False
    """True if the request leaves for another replica after its prompt."""
    handed: list[int] | None = None
    """Blocks of the hand-over pool that hold the keys and values of the request's computed tokens, or None."""


@dataclass(frozen=True, slots=True)
class Released:
    """A recorded call of ``Scheduler.release_requests``.

    It moved the requests with these numbers to another replica.
    """

    now: float
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class Offered:
    """A recorded call of ``Scheduler.offer_drafts``: the number of drafts for each request."""

    now: float
    offers: list[list[int]]
    """Pairs of a request's number and the number of its drafts."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A recorded call of ``Scheduler.store_blocks``, which states where the KV tiers store the blocks that the
    scheduler offered. ``hosts`` has the host block for each offered block, or -1 if the block is not copied.
    """

    now: float
    hosts: list[int]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recorded call of ``Scheduler.load_blocks``. ``number`` is None if the request had ended."""

    now: float
    number: int | None
    first: int
    hosts: list[int]


@dataclass(frozen=True, slots=True)
class Granted:
    """A recorded call of ``Scheduler.grant_hand_over``. ``number`` is None if the request had ended."""

    now: float
    number: int | None
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Distrusted:
    """A recorded call of ``Scheduler.distrust_blocks``."""

    now: float
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A recorded call of ``Scheduler.schedule``. If it returned no step, ``wakeup`` is the time to call it again."""

    now: float
    step: RecordedStep | None
    wakeup: float | None
    state: list[int] | None
    """The scheduler's counts after the call, in the order of ``STATE_NAMES``. None if they have not changed since the
    latest step.
    """


@dataclass(frozen=True, slots=True)
class Completed:
    """A recorded call of ``Scheduler.update`` with the result of a step."""

    now: float
    seq: int
    fault: list[Any] | None
    ends: list[int]
    """Indices of the step's sequences whose sampled token ended their request."""
    names: list[int] | None
    """Pseudonyms of the sampled tokens, or None if the recording has none."""
    queue_us: int
    graph_us: int
    sample_us: int
    outcome: int | str
    """Number of updates that the call returned, or name of the error that it raised."""
    state: list[int] | None
    """The scheduler's counts after a call that raised an error. None after any other call."""
    rejected: list[int] = field(default_factory=list)
    """Indices of the step's sampled tokens that do not count, because a draft before them was wrong."""
    bad_moves: list[int] = field(default_factory=list)
    """Indices of the step's block moves that found a wrong or damaged block in the hand-over pool."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A recorded call of ``Scheduler.finish_request``.

    ``number`` is None if the scheduler did not know the request id.
    """

    now: float
    number: int | None
    reason: str
    was_there: bool


@dataclass(frozen=True, slots=True)
class AgentLost:
    """A recorded call of ``Scheduler.agent_lost``."""

    now: float
    state: list[int]
    blameless: bool = False


@dataclass(frozen=True, slots=True)
class FailedAll:
    """A recorded call of ``Scheduler.fail_all``."""

    now: float
    num_ended: int
    state: list[int]


@dataclass(frozen=True, slots=True)
class TookEnded:
    """A recorded call of ``Scheduler.take_ended``.

    ``numbers`` are the numbers of the requests that ``schedule`` ended itself, for example because their deadline had
    passed.
    """

    now: float
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class VoidSteps:
    """A recorded call of ``Scheduler.void_steps``."""

    now: float
    seqs: list[int]


@dataclass(frozen=True, slots=True)
class Raised:
    """A recorded call in which the scheduler raised an unexpected error."""

    now: float
    call: Tag
    error: str


Event = (
    Added
    | Released
    | Offered
    | Stored
    | Loaded
    | Granted
    | Distrusted
    | Scheduled
    | Completed
    | Finished
    | AgentLost
    | FailedAll
    | TookEnded
    | VoidSteps
    | Raised
)

_EVENTS: dict[Tag, Callable[..., Event]] = {
    Tag.RELEASE: Released,
    Tag.OFFER: Offered,
    Tag.STORE: Stored,
    Tag.LOAD: Loaded,
    Tag.GRANT: Granted,
    Tag.DISTRUST: Distrusted,
    Tag.UPDATE: Completed,
    Tag.FINISH: Finished,
    Tag.AGENT_LOST: AgentLost,
    Tag.FAIL_ALL: FailedAll,
    Tag.TAKE_ENDED: TookEnded,
    Tag.VOID_STEPS: VoidSteps,
}
"""The event class of each tag. The fields of the class are ``now`` and then the fields of the record, in the same
order.
"""


@dataclass(slots=True)
class Segment:
    """One file of a flight recording."""

    file: Path
    header: SegmentHeader
    state: dict[str, Any]
    """The scheduler's state at the start of the segment.

    ``{"new": True}`` if the scheduler was new, and ``{"missing": reason}`` if the state was not saved.
    """
    records: list[list[Any]]
    is_torn: bool
    """True if the file ends within a frame, so that its last records are lost."""

    def events(self) -> Iterator[Event]:
        """Yields the recorded calls of the segment in order."""
        now, steps = self.header.engine_time, StepReader()
        for record in self.records:
            if record[0] == Tag.TIME:
                now = record[1]
            elif record[0] == Tag.DECODING:
                yield from _decoding(record, steps)
                now = record[3][-1]
            else:
                yield _event(record, now, steps)


@dataclass(slots=True)
class Stretch:
    """Segments of one server run that follow each other without a gap, the oldest first."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def header(self) -> SegmentHeader:
        return self.segments[0].header

    def events(self) -> Iterator[Event]:
        for segment in self.segments:
            yield from segment.events()


def read_recording(path: Path) -> list[Stretch]:
    """Reads a segment file or a folder of segments. Returns the stretches, the oldest first.

    A stretch has consecutive segments of one run without a gap. If the folder has recordings of several replicas, the
    stretches of replica 0 come first. Raises FlightRecordingError if there is no segment, or if a file is not a
    segment.
    """
    if folders := replica_folders(path):
        return [stretch for folder in folders for stretch in read_recording(folder)]
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise FlightRecordingError(f"{path}: no flight recording (no such file, or a folder without *{SUFFIX})")
    stretches = join_segments((file, file.read_bytes()) for file in files)
    if not stretches:
        raise FlightRecordingError(f"{path}: its segments are empty: their first frames are torn")
    return stretches


def join_segments(contents: Iterable[tuple[Path, bytes]]) -> list[Stretch]:
    """Returns the stretches of segments, the oldest first. ``contents`` has the path and the bytes of each segment.

    Raises FlightRecordingError if a file is not a segment.
    """
    segments = [segment for file, data in contents if (segment := _decode_segment(file, data)) is not None]
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


def _decode_segment(file: Path, data: bytes) -> Segment | None:
    frames = FrameReader(data, file)
    try:
        header, state = SegmentHeader.from_map(next(frames), file), next(frames)
    except StopIteration:
        return None
    records = [record for frame in frames for record in frame]
    return Segment(file, header, state, records, frames.is_torn)


def _decoding(record: list[Any], steps: StepReader) -> Iterator[Event]:
    """Yields the calls that one record of undisturbed decoding represents."""
    _, run, first_result, times, queue_us, graph_us, sample_us, counts, names, *rest = record
    irregular = {index: tuple(numbers) for index, *numbers in (rest[0] if rest else [])}
    num_sent = len(times) + sum(num_steps - 1 for _, num_steps, _ in irregular.values())
    sent = enumerate(steps.run(run, num_sent))
    num_seqs, counts_of = steps.num_seqs_of(run), dict(counts)
    results = enumerate(zip(queue_us, graph_us, sample_us, strict=True))
    for iteration, now in enumerate(times):
        num_results, num_steps, has_ended = irregular.get(iteration, (1, 1, True))
        for index, us in islice(results, num_results):
            named = None if names is None else names[index]
            yield Completed(now, first_result + index, None, [], named, *us, num_seqs, None)
        for index, step in islice(sent, num_steps):
            yield Scheduled(now, step, None, counts_of.get(index))
        if has_ended:
            yield Scheduled(now, None, None, None)


def _event(record: list[Any], now: float, steps: StepReader) -> Event:
    tag, fields = Tag(record[0]), record[1:]
    if tag is Tag.ADD:
        number, facts, names, refusal = fields
        prompt = None if names is None else array("i", names).tolist()
        return Added(now, number, facts, prompt, refusal)
    if tag is Tag.PLACE:
        number, facts, names, refusal, arrival_index, num_output_tokens, *hand_over = record[1:]
        tokens = None if names is None else array("i", names).tolist()
        num_prompt_tokens = facts["num_prompt_tokens"]
        prompt = None if tokens is None else tokens[:num_prompt_tokens]
        output = [PLAIN_TOKEN] * num_output_tokens if tokens is None else tokens[num_prompt_tokens:]
        return Added(now, number, facts, prompt, refusal, arrival_index, output, *hand_over)
    if tag is Tag.SCHEDULE:
        step, wakeup, state = fields
        return Scheduled(now, None if step is None else steps.step(step), wakeup, state)
    if tag is Tag.RAISED:
        return Raised(now, Tag(fields[0]), fields[1])
    return _EVENTS[tag](now, *fields)
