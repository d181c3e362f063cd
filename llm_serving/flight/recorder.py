"""The flight recorder: stands before the scheduler, with the same methods, and writes down each call.

It changes nothing and decides nothing: what the scheduler gives and raises is passed on. ``schedule`` and ``update``
leave no more than a tuple of references; records are made of them for many steps together, one for turns alike, while
what makes them is in the processor's caches, and written in one call, without waiting for the disk: when
``WRITE_INTERVAL_S`` has passed, at the end of a turn in which something else happened, and when no step is in flight.
An error of the recorder is logged and never reaches the engine: a full disk pauses the recording, anything else ends
it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import Any, cast

from llm_serving.flight.facts import ending_indices, ending_tokens, is_gone, is_whole, request_facts
from llm_serving.flight.format import SegmentHeader, Tag
from llm_serving.flight.identities import Identities
from llm_serving.flight.ring import SegmentRing
from llm_serving.flight.segments import SegmentWriter
from llm_serving.flight.steps import StepWriter
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["READ_ONLY_METHODS", "STATE_NAMES", "FlightRecorder", "as_scheduler", "state_of"]

READ_ONLY_METHODS = frozenset({"check_integrity", "counts", "known_prefix", "next_wakeup", "queue_full", "start_room"})
"""Methods of the scheduler that change nothing and are not recorded."""

_TIME, _SCHEDULE, _UPDATE, _TURNS = int(Tag.TIME), int(Tag.SCHEDULE), int(Tag.UPDATE), int(Tag.TURNS)
"""Of the records of every turn: a plain number is written in a tenth of the time of an enumeration's member."""
_NOTHING = -1
"""``schedule`` had no step, among the calls that are taken down."""
_CALLS_OF_A_TURN = 3
_LEAST_TURNS = 2
"""Fewer are not worth a record of turns."""
_ANSWER = attrgetter(
    "seq", "sampled_ids", "logits", "logsumexps", "error", "aborted", "queue_us", "graph_us", "sample_us"
)
WRITE_INTERVAL_S = 0.05
"""While steps are in flight and nothing but steps happens, records are written so often, together."""
_AT_ONCE = -math.inf
_MAX_CALLS = 256
"""So many are written at the end of their turn, whatever the clock says; twice as many at once."""
_MAX_KEPT_ROWS = 512
"""Sequences in steps that are kept before they are written: more are no longer in the processor's cache by then."""
_MAX_PENDING = 64

Counts = tuple[int, int, int, int, int, int, int]
"""What ``Scheduler.counts`` gives, see ``STATE_NAMES``."""
_Call = tuple[int, float, Any, Any, Any, Counts | None]
"""``schedule`` or ``update``: tag, time, step or answer, lengths of the step's block tables or the answer's updates
(where tokens have names), wake-up or outcome, counts afterwards."""


class FlightRecorder:
    """Records ``scheduler`` into ``ring``. ``header`` is that of the run's first segment.

    ``scheduler`` is as its constructor made it. ``seconds`` and ``num_steps`` tell what recording costs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ring: SegmentRing,
        header: SegmentHeader,
        *,
        identities: bool,
        on_error: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.seconds = 0.0
        """Time spent recording."""
        self.num_steps = 0
        """Steps recorded."""
        self.next_wakeup = scheduler.next_wakeup
        self._scheduler = scheduler
        self._on_error = on_error
        self._identities = Identities() if identities else None
        self._segments = SegmentWriter(ring, header, scheduler, self._identities, on_error, wall_clock)
        self._steps = StepWriter()
        self._sent: dict[int, ScheduledStep] = {}
        self._requests: dict[str, tuple[int, Request]] = {}
        self._endings: set[int] = set()
        self._calls: list[_Call] = []
        """Since the last look."""
        self._num_kept_rows = 0
        self._wants_counts = True
        self._seen_requests: list[Request] | None = None
        self._seen_lens: list[int] = []
        """Of the last step whose counts were taken."""
        self._pending: list[object] = []
        self._due = _AT_ONCE
        self._now = 0.0
        self._num_requests = 0
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        """All that only looks at the scheduler."""
        return getattr(self._scheduler, name)

    # What the engine asks in every turn

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_swaps(self) -> int:
        return self._scheduler.num_swaps

    # What the engine calls

    def add_request(self, request: Request) -> None:
        """See ``Scheduler``; so are the others."""
        refusal: str | None = None
        try:
            self._scheduler.add_request(request)
        except Exception as error:
            refusal = type(error).__name__
            raise
        finally:
            self._record(self._note_add, request, refusal)

    def place_request(self, request: Request, arrival_index: int, now: float) -> None:
        refusal: str | None = None
        facts = request_facts(request)
        try:
            self._scheduler.place_request(request, arrival_index, now)
        except Exception as error:
            refusal = type(error).__name__
            raise
        finally:
            self._record(self._note_place, request, facts, arrival_index, refusal, now)

    def release_requests(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._scheduler.release_requests(request_ids)
        self._record(self._note_release, request_ids)

    def schedule(self, now: float) -> ScheduledStep | None:
        try:
            step = self._scheduler.schedule(now)
        except Exception as error:
            self._record(self._note_raised, Tag.SCHEDULE, error, now)
            raise
        if self._ended:
            return step
        begin = perf_counter()
        try:
            if step is not None:
                self._note_step(step, now)
            elif (calls := self._calls) and calls[-1][0] == _SCHEDULE:  # the end of most turns
                calls.append((_NOTHING, now, None, None, self._scheduler.next_wakeup(now), None))
                if now >= self._due or len(calls) >= _MAX_CALLS:
                    self._flush()
            else:
                self._note_nothing(now)
        except Exception as error:
            self._fail(error)
        self.seconds += perf_counter() - begin
        return step

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        try:
            updates = self._scheduler.update(result, now)
        except Exception as error:
            self._record(self._note_failed_update, result, error, now)
            raise
        if self._ended:
            return updates
        begin = perf_counter()
        named = None if self._identities is None else updates
        self._calls.append((_UPDATE, now, result, named, len(updates), None))
        if result.error is not None:
            self._due = _AT_ONCE
        self.seconds += perf_counter() - begin
        return updates

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        number = self._requests.get(request_id, (None,))[0]
        update = self._scheduler.finish_request(request_id, reason, now)
        self._record(self._note, [Tag.FINISH, number, reason.name, update is not None], now)
        return update

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None:
        return self.finish_request(request_id, FinishReason.ABORT, now)

    def void_steps(self) -> list[int]:
        void = self._scheduler.void_steps()
        self._record(self._note, [Tag.VOID_STEPS, void])
        return void

    def take_ended(self) -> list[RequestUpdate]:
        updates = self._scheduler.take_ended()
        if updates:
            self._record(self._note_ended, updates)
        return updates

    def agent_lost(self, now: float) -> None:
        self._scheduler.agent_lost(now)
        self._record(self._note_lost, now)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        updates = self._scheduler.fail_all(error, now)
        self._record(self._note, [Tag.FAIL_ALL, len(updates), state_of(self._scheduler)], now)
        return updates

    def close(self) -> None:
        """Write what is left and close the files."""
        self._record(self._flush)
        self._segments.close()
        self._ended = True

    # Records

    def _record(self, note: Callable[..., None], *details: Any) -> None:
        """Run ``note``; whatever goes wrong in it is the recorder's affair alone."""
        if self._ended:
            return
        begin = perf_counter()
        if self._segments.is_new:
            self._guarded(self._begin_segment)
        try:
            note(*details)
        except Exception as error:
            self._fail(error)
        self.seconds += perf_counter() - begin

    def _guarded(self, action: Callable[..., None]) -> None:
        try:
            action()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self._pause(error)
        else:
            self._ended = True
            self._segments.close()
            self._on_error(f"the flight recorder has stopped on an internal error: {error!r}")

    def _note(self, record: list[object], now: float | None = None) -> None:
        """A record of a call that is not of every step; it is written at the end of this turn."""
        self._take_calls()
        if now is not None:
            self._note_time(now)
        self._pending.append(record)
        self._due = _AT_ONCE
        if len(self._pending) >= _MAX_PENDING:
            self._flush()

    def _note_time(self, now: float) -> None:
        if now != self._now:
            self._now = now
            self._pending.append((_TIME, now))

    def _note_add(self, request: Request, refusal: str | None) -> None:
        number, names = self._know(request, refusal)
        self._note([Tag.ADD, number, request_facts(request), names, refusal])

    def _note_place(
        self, request: Request, facts: dict[str, Any], arrival_index: int, refusal: str | None, now: float
    ) -> None:
        number, names = self._know(request, refusal)
        self._note([Tag.PLACE, number, facts, names, refusal, arrival_index, len(request.output_token_ids)], now)

    def _know(self, request: Request, refusal: str | None) -> tuple[int, bytes | None]:
        """A new request's number, and the names of its tokens where there are any."""
        self._take_calls()
        number = self._num_requests
        self._num_requests += 1
        if refusal is not None:
            return number, None
        if len(self._requests) > 2 * (self._scheduler.num_running + self._scheduler.num_waiting) + _MAX_PENDING:
            self._forget_ended()
        self._requests[request.request_id] = (number, request)
        self._endings |= ending_tokens(request)
        return number, None if self._identities is None else self._identities.add(request)

    def _note_release(self, request_ids: list[str]) -> None:
        self._note([Tag.RELEASE, [self._requests[request_id][0] for request_id in request_ids]])
        for request_id in request_ids:
            self._forget(request_id)
        self._steps.renumber()  # one that comes back has another number

    # Of the calls of every step only what may change is taken down at once; the rest is done for many of them together.
    # The counts are taken when a step is sent to other sequences than the last, or with more blocks, or after another
    # call than these, and when there is nothing to send: there alone can they be others.

    def _note_step(self, step: ScheduledStep, now: float) -> None:
        self.num_steps += 1
        table_lens = list(map(len, step.block_tables))
        counts = None
        if self._wants_counts or step.requests is not self._seen_requests or table_lens != self._seen_lens:
            self._wants_counts, self._seen_requests, self._seen_lens = False, step.requests, table_lens
            counts = self._scheduler.counts()
        self._calls.append((_SCHEDULE, now, step, table_lens, None, counts))
        self._num_kept_rows += len(table_lens)
        if self._num_kept_rows >= _MAX_KEPT_ROWS:
            self._due = _AT_ONCE
        if len(self._calls) >= 2 * _MAX_CALLS:
            self._flush()

    def _note_nothing(self, now: float) -> None:
        """No step was sent just before."""
        counts = self._scheduler.counts()
        self._calls.append((_NOTHING, now, None, None, self._scheduler.next_wakeup(now), counts))
        num_steps_in_flight = counts[4]
        if now >= self._due or not num_steps_in_flight:
            self._flush()

    def _note_failed_update(self, result: StepResult, error: Exception, now: float) -> None:
        self._calls.append((_UPDATE, now, result, [], type(error).__name__, self._scheduler.counts()))
        self._due = _AT_ONCE

    def _take_calls(self) -> None:
        """Make records of the calls that were taken down."""
        calls, self._calls = self._calls, []
        self._num_kept_rows, self._wants_counts = 0, True
        if (turns := self._turns_record(calls)) is not None:
            self._pending.append(turns)
            self._now = calls[-1][1]
            return
        pending = self._pending
        for tag, now, what, more, outcome, counts in calls:
            if now != self._now:
                self._now = now
                pending.append((_TIME, now))
            if tag == _UPDATE:
                pending.append(self._answer_record(what, more, outcome, counts))
            elif tag == _NOTHING:
                pending.append((_SCHEDULE, None, outcome, counts))
            else:
                self._sent[what.seq] = what
                pending.append((_SCHEDULE, self._steps.record(what, self._number_of, more), None, counts))

    def _turns_record(self, calls: list[_Call]) -> tuple[object, ...] | None:
        """``calls`` as one record of turns alike; None, and nothing is noted, where they are not.

        What decodes in peace is nothing else. A few passes in C for all of the turns together.
        """
        count, rest = divmod(len(calls), _CALLS_OF_A_TURN)
        if rest or count < _LEAST_TURNS:
            return None
        tags, times, results, updates, outcomes, _ = zip(*calls[0::3], strict=True)
        sent_tags, sent_times, steps, table_lens, _, counts = zip(*calls[1::3], strict=True)
        end_tags, end_times, _, _, wakeups, end_counts = zip(*calls[2::3], strict=True)
        is_alike = (
            tags.count(_UPDATE) == sent_tags.count(_SCHEDULE) == end_tags.count(_NOTHING) == count
            and wakeups.count(None) == end_counts.count(None) == count
            and times == sent_times == end_times
        )
        if not is_alike:
            return None
        answers = tuple(zip(*map(_ANSWER, results), strict=True))
        if not self._are_plain(answers, outcomes, steps[0]):
            return None
        first = results[0].seq
        num_before = steps[0].seq - first
        run = self._steps.record_run(steps, table_lens)
        if run is None:
            return None
        for seq in range(first, first + min(num_before, count)):
            del self._sent[seq]
        for step in steps[max(0, count - num_before) :]:
            self._sent[step.seq] = step
        states = [(place, state) for place, state in enumerate(counts) if state is not None]
        names = None
        if self._identities is not None:
            names = [self._identities.take(each, len(each)) for each in updates]
        return (_TURNS, run, first, times, *answers[-3:], states, names)

    def _are_plain(self, answers: Sequence[Any], outcomes: Sequence[int | str], sent_first: ScheduledStep) -> bool:
        """Whether these answers (columns of ``_ANSWER``), of which the first is to a step sent before ``sent_first``,
        brought a token to each sequence of the latest step, and ended none. Steps from ``sent_first`` on are looked at
        by who records them."""
        seqs, sampled, logits, logsumexps, errors, aborted, _, _, _ = answers
        count, size, first, sent = len(seqs), sent_first.num_seqs, sent_first.seq, self._sent
        if not (
            size > 0
            and outcomes.count(size) == errors.count(None) == aborted.count(False) == count
            and seqs == tuple(range(seqs[0], seqs[0] + count))
            and seqs[0] < first
            and list(map(len, chain(sampled, logits, logsumexps))).count(size) == 3 * count
            and self._endings.isdisjoint(chain.from_iterable(sampled))
            and min(map(min, sampled)) >= 0
        ):
            return False
        before = [sent.get(seq) for seq in range(seqs[0], min(first, seqs[0] + count))]
        return all(step is not None and self._steps.goes_on(step) for step in before)

    def _answer_record(
        self, answer: StepResult, updates: list[RequestUpdate] | None, outcome: int | str, counts: Counts | None
    ) -> tuple[object, ...]:
        seq, sampled_ids, logits, logsumexps, error, aborted, *times = _ANSWER(answer)
        step = self._sent.pop(seq, None)
        fault: list[object] | None = None
        ends, names = [], None
        if (
            error is not None
            or aborted
            or step is None
            or not is_whole(step, sampled_ids, len(logits), len(logsumexps))
        ):
            signs = [token >= 0 for token in sampled_ids]
            fault = [aborted, error is not None, [signs, len(logits), len(logsumexps)]]
        if step is not None and not self._endings.isdisjoint(sampled_ids):
            ends = ending_indices(step, sampled_ids)
        if self._identities is not None and updates:
            names = self._identities.take(updates, len(sampled_ids))
        return (_UPDATE, seq, fault, ends, names, *times, outcome, counts)

    def _note_lost(self, now: float) -> None:
        self._note([Tag.AGENT_LOST, state_of(self._scheduler)], now)
        self._sent.clear()

    def _note_ended(self, updates: list[RequestUpdate]) -> None:
        self._note([Tag.TAKE_ENDED, [self._number_of(update.request) for update in updates]])

    def _note_raised(self, tag: Tag, error: Exception, now: float | None = None) -> None:
        self._note([Tag.RAISED, tag, type(error).__name__], now)
        self._flush()

    def _number_of(self, request: Request) -> int:
        return self._requests[request.request_id][0]

    def _forget_ended(self) -> None:
        for request_id, (_, request) in list(self._requests.items()):
            if is_gone(request):
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        number, request = self._requests.pop(request_id)
        self._steps.forget(number)
        if self._identities is not None:
            self._identities.forget(request)

    # Segments

    def _flush(self) -> None:
        """Write what there is, which is lost while the recording pauses; then the next segment begins if it is time.
        The scheduler's state is that after the last record."""
        if self._segments.is_new:
            self._guarded(self._begin_segment)
        self._take_calls()
        self._due = self._now + WRITE_INTERVAL_S
        records, self._pending = self._pending, []
        self._segments.write(records)
        if self._segments.wants_next(self._now):
            self._begin_segment()

    def _begin_segment(self) -> None:
        """What records refer to begins anew, too."""
        self._forget_ended()
        self._steps = StepWriter()
        self._endings = set().union(*(ending_tokens(request) for _, request in self._requests.values()))
        self._segments.begin(self._now, {name: number for name, (number, _) in self._requests.items()})

    def _pause(self, error: OSError) -> None:
        self._calls.clear()
        self._num_kept_rows = 0
        self._pending.clear()
        self._segments.pause(self._now, error)


def state_of(scheduler: Scheduler) -> list[int]:
    """The counts that go with each record, in the order of ``STATE_NAMES``."""
    return list(scheduler.counts())


STATE_NAMES = ("running", "waiting", "free blocks", "preemptions", "steps in flight", "swapped", "swaps")


def as_scheduler(recorder: FlightRecorder) -> Scheduler:
    """The recorder for those who want a scheduler: it has all of its public members."""
    return cast(Scheduler, recorder)
