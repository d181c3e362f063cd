"""Runs a part of a flight recording through the real scheduler and compares every decision.

The part is a ``Stretch``: consecutive segments of one run without a gap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Any

from llm_serving.errors import LLMServingError
from llm_serving.flight.facts import make_request, make_result
from llm_serving.flight.format import FORMAT_VERSION, STATE_NAMES, FlightRecordingError, Tag
from llm_serving.flight.pseudonyms import ENDING_TOKEN, PLAIN_TOKEN
from llm_serving.flight.reader import (
    Added,
    AgentLost,
    Completed,
    Distrusted,
    Event,
    FailedAll,
    Finished,
    Granted,
    Loaded,
    Offered,
    Raised,
    Released,
    Scheduled,
    Segment,
    Stored,
    Stretch,
    TookEnded,
    VoidSteps,
)
from llm_serving.flight.setup import code_digest, limits_from_map
from llm_serving.flight.state import ReplayCodec, first_difference, restore_state
from llm_serving.flight.step_writer import StepWriter
from llm_serving.flight.steps import RecordedStep, StepReader
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.output import ScheduledStep
from llm_serving.scheduler.scheduler import Scheduler
from tools.replaying.describe import describe_event
from tools.replaying.result_order import ResultOrder

__all__ = ["Difference", "Replay", "replay"]

HISTORY = 8
"""Number of earlier events that are shown with a difference."""


@dataclass(frozen=True)
class Difference:
    """The first decision that differs from the recorded one."""

    call: str
    num_steps: int
    """Number of equal steps before the difference."""
    field: str
    recorded: object
    replayed: object
    event: str
    before: list[str]
    """The latest events before the difference, one line each."""


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay: what was replayed, the first difference if there is one, and notes for the user."""

    num_steps: int
    num_requests: int
    difference: Difference | None
    notes: list[str]


def replay(stretch: Stretch) -> Replay:
    """Replays a part of a recording, from its first segment that contains the scheduler's state.

    Raises FlightRecordingError if no segment contains a state.
    """
    return _Replayer(stretch).run()


class _EndingNames(frozenset[int]):
    """A set of tokens that end a request. It grows during the replay.

    When the scheduler adds a request, it must know the tokens that end the request. A recording has an ending token
    only in the later result that contains the token. When the replay reaches this result, the replay adds the
    token to ``names``. A union with another set returns this object itself, so that the scheduler sees later additions.
    """

    names: set[int]

    def __new__(cls) -> _EndingNames:
        made = super().__new__(cls)
        made.names = {ENDING_TOKEN}
        return made

    def __contains__(self, token: object) -> bool:
        return token in self.names

    def __or__(self, other: Any) -> _EndingNames:  # type: ignore[override]
        return self

    __ror__ = __or__


class _DiffersError(Exception):
    def __init__(self, call: str, field: str, recorded: object, replayed: object) -> None:
        super().__init__(field)
        self.call, self.field, self.recorded, self.replayed = call, field, recorded, replayed


class _Replayer:
    def __init__(self, stretch: Stretch) -> None:
        self._notes: list[str] = []
        self._segments = self._replayable(stretch)
        header = stretch.header
        if header.code_digest != code_digest():
            self._notes.append("the recording was made by another version of the scheduler's code")
        self._scheduler = Scheduler(limits_from_map(header.limits))
        self._codec = ReplayCodec(self._scheduler.limits.prefix_cache)
        self._order = ResultOrder(header.limits["policy"])
        self._requests: dict[int, Request] = {}
        self._numbers: dict[str, int] = {}
        self._sampling: dict[int, list[bool]] = {}
        self._step_requests: dict[int, list[Request]] = {}
        self._writer, self._reader = StepWriter(), StepReader()
        self._before: deque[str] = deque(maxlen=HISTORY)
        self._num_steps = 0

    def run(self) -> Replay:
        event: Event | None = None
        difference = None
        try:
            for index, segment in enumerate(self._segments):
                event = None
                self._begin(segment, first=index == 0)
                for event in segment.events():
                    self._replay(event)
                    self._before.append(describe_event(event))
        except _DiffersError as found:
            place = "the next segment begins" if event is None else describe_event(event)
            difference = Difference(
                found.call, self._num_steps, found.field, found.recorded, found.replayed, place, list(self._before)
            )
        return Replay(self._num_steps, len(self._requests), difference, self._notes)

    def _replayable(self, stretch: Stretch) -> list[Segment]:
        for index, segment in enumerate(stretch.segments):
            is_current = segment.header.format_version == FORMAT_VERSION
            if "new" in segment.state or ("parts" in segment.state and is_current):
                return stretch.segments[index:]
            self._notes.append(f"segment {segment.header.index} is skipped: {_reason(segment)}")
        raise FlightRecordingError(
            "no segment of the stretch begins with the scheduler's state: " + "; ".join(map(_reason, stretch.segments))
        )

    # The following methods begin a segment of the recording, and store its requests and steps.

    def _begin(self, segment: Segment, *, first: bool) -> None:
        self._writer, self._reader = StepWriter(), StepReader()
        if first and "parts" in segment.state:
            self._restore(segment)
        elif not first and "parts" in segment.state:
            found = first_difference(segment.state, self._scheduler.snapshot(self._codec))
            if found is not None:
                raise _DiffersError("state", *found)

    def _restore(self, segment: Segment) -> None:
        numbers = segment.header.numbers
        lost = restore_state(self._scheduler, segment.state, self._codec)
        if lost:
            self._notes.append(f"{lost} cached blocks cannot be found any more: replacing one may change decisions")
        for sequence in self._scheduler.sequences():
            request = sequence.request
            sequence.ending_token_ids = request.end_token_ids = _EndingNames()
            if request.request_id in numbers:
                self._know(numbers[request.request_id], request)
        for step in self._scheduler.steps_in_flight():
            self._sent(step)
        self._notes.append(f"the replay begins with segment {segment.header.index} and {len(numbers)} requests")

    def _know(self, number: int, request: Request) -> None:
        self._requests[number] = request
        self._numbers[request.request_id] = number

    def _sent(self, step: ScheduledStep) -> None:
        self._sampling[step.seq] = list(step.do_sample)
        self._step_requests[step.seq] = list(step.requests)
        self._order.sent(step)

    # Each of the following methods repeats one kind of recorded call.

    def _replay(self, event: Event) -> None:
        if isinstance(event, Added):
            self._add(event)
        elif isinstance(event, Released):
            self._scheduler.release_requests([self._requests[number].request_id for number in event.numbers])
        elif isinstance(event, Offered):
            self._offer(event)
        elif isinstance(event, Stored):
            self._scheduler.store_blocks(event.hosts)
        elif isinstance(event, Loaded):
            self._load(event)
        elif isinstance(event, Granted):
            self._scheduler.grant_hand_over(self._id_of(event.number), event.blocks)
        elif isinstance(event, Distrusted):
            self._scheduler.distrust_blocks(event.now, recompute=event.recompute)
        elif isinstance(event, Scheduled):
            self._schedule(event)
        elif isinstance(event, Completed):
            self._complete(event)
        elif isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, AgentLost):
            self._scheduler.agent_lost(event.now, blameless=event.blameless)
            self._order.lost()
            self._compare_state("agent_lost", event.state)
        elif isinstance(event, FailedAll):
            ended = self._scheduler.fail_all("", event.now)
            self._compare("fail_all", "requests that end", event.num_ended, len(ended))
            self._compare_state("fail_all", event.state)
        elif isinstance(event, TookEnded):
            updates = self._scheduler.take_ended()
            replayed = [self._numbers[update.request.request_id] for update in updates]
            self._compare("take_ended", "requests", event.numbers, replayed)
        elif isinstance(event, VoidSteps):
            self._compare("void_steps", "steps", event.seqs, self._scheduler.void_steps())
        else:
            self._raise_again(event)

    def _add(self, event: Added) -> None:
        request, refusal = make_request(event.facts, event.prompt), None
        request.end_token_ids = _EndingNames()
        try:
            if event.arrival_index is None:
                self._scheduler.add_request(request)
            else:
                request.output_token_ids += event.output or []
                self._scheduler.place_request(
                    request, event.arrival_index, event.now, hands_over=event.hands_over, handed=event.handed
                )
        except LLMServingError as error:
            refusal = type(error).__name__
        else:
            self._know(event.number, request)
        self._compare("add_request", "refusal", event.refusal, refusal)

    def _offer(self, event: Offered) -> None:
        """Offers as many drafts as were recorded. The drafts may have any tokens, because the results come from the
        recording.
        """
        known = [(self._requests[number].request_id, size) for number, size in event.offers if number in self._requests]
        self._scheduler.offer_drafts([(request_id, [PLAIN_TOKEN] * size) for request_id, size in known])

    def _load(self, event: Loaded) -> None:
        self._scheduler.load_blocks(self._id_of(event.number), event.first, event.hosts)

    def _id_of(self, number: int | None) -> str:
        request = self._requests.get(-1 if number is None else number)
        return "unknown" if request is None else request.request_id

    def _schedule(self, event: Scheduled) -> None:
        try:
            step = self._scheduler.schedule(event.now)
        except Exception as error:  # an error that the recorded run did not have is a difference
            raise _DiffersError("schedule", "raised", None, repr(error)) from error
        replayed = None if step is None else self._reader.step(_as_read(self._writer.record(step, self._number_of)))
        if replayed is None or event.step is None:
            self._compare("schedule", "step", event.step, replayed)
            self._compare("schedule", "wake-up", event.wakeup, self._scheduler.next_wakeup(event.now))
        else:
            for declared in fields(RecordedStep):
                name = declared.name
                self._compare("schedule", name, getattr(event.step, name), getattr(replayed, name))
            assert step is not None
            self._sent(step)
        self._compare_state("schedule", event.state)
        self._num_steps += step is not None

    def _complete(self, event: Completed) -> None:
        overtaken = self._order.completed(event.seq, ran=event.fault is None)
        if overtaken is not None:
            rule = f"step {overtaken} was sent earlier and runs first (agent's queue, policy {self._order.policy})"
            raise _DiffersError("update", "order of results", f"step {event.seq} completed before {overtaken}", rule)
        times = (event.queue_us, event.graph_us, event.sample_us)
        do_sample = self._sampling.pop(event.seq, [])
        self._let_end(event)
        result = make_result(
            *(event.seq, do_sample, event.fault, event.ends, event.names, times, event.rejected, event.bad_moves)
        )
        outcome: int | str
        try:
            outcome = len(self._scheduler.update(result, event.now))
        except Exception as error:
            outcome = type(error).__name__
        self._compare("update", "updates", event.outcome, outcome)
        self._compare_state("update", event.state)

    def _let_end(self, event: Completed) -> None:
        """Adds tokens that ended a request in this step to the request's ending tokens.

        Must run before the scheduler gets the result of the step.
        """
        requests = self._step_requests.pop(event.seq, [])
        if event.names is None:
            return
        for index in event.ends:
            endings = requests[index].end_token_ids
            if event.names[index] != PLAIN_TOKEN and isinstance(endings, _EndingNames):
                endings.names.add(event.names[index])

    def _finish(self, event: Finished) -> None:
        update = self._scheduler.finish_request(self._id_of(event.number), FinishReason[event.reason], event.now)
        self._compare("finish_request", "was known", event.was_there, update is not None)

    def _raise_again(self, event: Raised) -> None:
        replayed = None
        if event.call is Tag.SCHEDULE:
            try:
                self._scheduler.schedule(event.now)
            except Exception as error:
                replayed = type(error).__name__
        self._compare(event.call.name.lower(), "raised", event.error, replayed)

    def _number_of(self, request: Request) -> int:
        return self._numbers[request.request_id]

    # The following methods compare the recording with the replay.

    def _compare(self, call: str, field: str, recorded: object, replayed: object) -> None:
        if recorded != replayed:
            raise _DiffersError(call, field, recorded, replayed)

    def _compare_state(self, call: str, recorded: list[int] | None) -> None:
        if recorded is None:
            return
        for name, before, after in zip(STATE_NAMES, recorded, self._scheduler.counts(), strict=True):
            self._compare(call, name, before, after)


def _as_read(record: list[Any]) -> list[Any]:
    """Returns a copy of a step's record and of its lists, because the scheduler changes the original lists later."""
    return [list(part) if isinstance(part, list) else part for part in record]


def _reason(segment: Segment) -> str:
    """Returns why a replay cannot start with a segment."""
    reason = segment.state.get("missing", f"its state has format {segment.header.format_version}, which is too old")
    return str(reason)
