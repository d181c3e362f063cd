"""What is written of the scheduler's calls, and when.

Calls of ``schedule`` and ``update`` leave no more than a tuple of references; records are made of them for many steps
together, one for turns alike (``turns``), and written in one call, without waiting for the disk: when
``WRITE_INTERVAL_S`` has passed, at the end of a turn in which something else happened, and when no step is in flight.
"""

from __future__ import annotations

import math

from llm_serving.flight.calls import ANSWER, CALLS_OF_A_TURN, NOTHING, SCHEDULE, UPDATE, Call
from llm_serving.flight.counts import Counts
from llm_serving.flight.facts import ending_indices, is_whole
from llm_serving.flight.format import Tag
from llm_serving.flight.identities import Identities
from llm_serving.flight.known_requests import KnownRequests
from llm_serving.flight.segments import SegmentWriter
from llm_serving.flight.step_writer import StepWriter
from llm_serving.flight.turns import turns_record
from llm_serving.request import Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["WRITE_INTERVAL_S", "Journal"]

_TIME = int(Tag.TIME)
WRITE_INTERVAL_S = 0.2
"""While steps are in flight and nothing but steps happens, records are written so often, together."""
_AT_ONCE = -math.inf
_MAX_CALLS = 768
"""So many are written at the end of their turn, whatever the clock says; twice as many at once."""
_MAX_KEPT_ROWS = 1024
"""Sequences in steps that are kept before they are written: more are no longer in the processor's cache by then."""
_MAX_PENDING = 64


class Journal:
    """Writes the calls of ``scheduler`` into ``segments``. Raises OSError when the disk takes no more: the caller then
    calls ``pause``."""

    def __init__(self, scheduler: Scheduler, segments: SegmentWriter, identities: Identities | None) -> None:
        self.num_steps = 0
        """Steps recorded."""
        self._scheduler = scheduler
        self._figures = scheduler.figures
        self._segments = segments
        self._requests = KnownRequests(identities, self._forgotten)
        self._names_tokens = identities is not None
        self._sent: dict[int, ScheduledStep] = {}
        self._steps = StepWriter()
        self._calls: list[Call] = []
        """Since the last look."""
        self._max_calls = _MAX_CALLS
        self._seen_requests: list[Request] | None = None
        self._seen_lens: list[int] = []
        """Of the last step whose counts were taken. No requests: those of the next are taken."""
        self._pending: list[object] = []
        self._due = _AT_ONCE
        self._now = 0.0

    # Calls of every turn

    def note_step(self, step: ScheduledStep, now: float) -> None:
        """``schedule`` gave a step.

        Counts are taken when it has other sequences than the last, or more blocks, or another call than ``schedule``
        and ``update`` came before it, and when there is nothing to send: there alone can they be others.
        """
        self.num_steps += 1
        table_lens = list(map(len, step.block_tables))
        if step.requests is self._seen_requests and table_lens == self._seen_lens:
            self._calls.append((SCHEDULE, now, step, table_lens, None, None))
        else:
            self._note_change(step, table_lens, now)
        if len(self._calls) >= 2 * _MAX_CALLS:
            self.flush()

    def note_update(self, result: StepResult, updates: list[RequestUpdate], now: float) -> None:
        """``update`` took an answer."""
        self._calls.append((UPDATE, now, result, updates if self._names_tokens else None, len(updates), None))
        if result.error is not None:
            self._due = _AT_ONCE

    def note_nothing(self, now: float) -> None:
        """``schedule`` gave no step: the turn ends."""
        calls, wakeup = self._calls, self._scheduler.next_wakeup(now)
        if calls and calls[-1][0] == SCHEDULE:  # the end of most turns
            calls.append((NOTHING, now, None, None, wakeup, None))
            if now >= self._due or len(calls) >= self._max_calls:
                self.flush()
        else:
            counts = self._figures.counts()
            calls.append((NOTHING, now, None, None, wakeup, counts))
            num_steps_in_flight = counts[4]
            if now >= self._due or not num_steps_in_flight:
                self.flush()

    def _note_change(self, step: ScheduledStep, table_lens: list[int], now: float) -> None:
        """A step of other sequences than the last, or with more blocks."""
        self._seen_requests, self._seen_lens = step.requests, table_lens
        self._calls.append((SCHEDULE, now, step, table_lens, None, self._figures.counts()))
        self._max_calls = min(_MAX_CALLS, CALLS_OF_A_TURN * _MAX_KEPT_ROWS // max(1, len(table_lens)))

    def note_failed_update(self, result: StepResult, error: Exception, now: float) -> None:
        """``update`` raised."""
        self._calls.append((UPDATE, now, result, [], type(error).__name__, self._figures.counts()))
        self._due = _AT_ONCE

    # Other calls

    def begin(self) -> None:
        """The first segment, before the first record."""
        if self._segments.is_new:
            self._begin_segment()

    def note(self, record: list[object], now: float | None = None) -> None:
        """A record of a call that is not of every step; it is written at the end of this turn."""
        self._take_calls()
        self._seen_requests = None
        if now is not None:
            self._note_time(now)
        self._pending.append(record)
        self._due = _AT_ONCE
        if len(self._pending) >= _MAX_PENDING:
            self.flush()

    def know(self, request: Request, *, refused: bool) -> tuple[int, bytes | None]:
        """A new request's number, and the names of its tokens where there are any."""
        self._take_calls()
        if not refused and len(self._requests) > 2 * self._num_requests() + _MAX_PENDING:
            self._requests.forget_ended()
        return self._requests.add(request, refused=refused)

    def number_of(self, request: Request) -> int:
        return self._requests.number_of(request)

    def find(self, request_id: str) -> int | None:
        """A request's number; None where it is not known."""
        return self._requests.find(request_id)

    def release(self, request_ids: list[str]) -> None:
        """Requests that went elsewhere: those that come back have other numbers."""
        for request_id in request_ids:
            self._requests.forget(request_id)
        self._steps.renumber()

    def lose_steps(self) -> None:
        """No step is in flight any more."""
        self._sent.clear()

    # Writing

    def flush(self) -> None:
        """Write what there is, which is lost while the recording pauses; then the next segment begins if it is time.
        The scheduler's state is that after the last record."""
        self.begin()
        self._take_calls()
        self._due = self._now + WRITE_INTERVAL_S
        records, self._pending = self._pending, []
        self._segments.write(records)
        if self._segments.wants_next(self._now):
            self._begin_segment()

    def pause(self, error: OSError) -> None:
        """Nothing is written for a while."""
        self._take_calls()
        self._pending.clear()
        self._segments.pause(self._now, error)

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._segments.close()

    def _begin_segment(self) -> None:
        """What records refer to begins anew, too."""
        self._requests.forget_ended()
        self._steps = StepWriter()
        self._requests.settle_endings()
        self._seen_requests = None
        self._segments.begin(self._now, self._requests.numbers)

    def _num_requests(self) -> int:
        return self._figures.num_running + self._figures.num_waiting

    def _forgotten(self, number: int) -> None:
        self._steps.forget(number)

    # Records of calls

    def _take_calls(self) -> None:
        """Make records of the calls that were taken down."""
        calls, self._calls = self._calls, []
        if (turns := turns_record(calls, self._steps, self._sent, self._requests)) is not None:
            self._pending.append(turns)
            self._now = calls[-1][1]
            return
        pending = self._pending
        for tag, now, what, more, outcome, counts in calls:
            self._note_time(now)
            if tag == UPDATE:
                pending.append(self._answer_record(what, more, outcome, counts))
            elif tag == NOTHING:
                pending.append((SCHEDULE, None, outcome, counts))
            else:
                self._sent[what.seq] = what
                pending.append((SCHEDULE, self._steps.record(what, self._requests.number_of, more), None, counts))

    def _note_time(self, now: float) -> None:
        if now != self._now:
            self._now = now
            self._pending.append((_TIME, now))

    def _answer_record(
        self, answer: StepResult, updates: list[RequestUpdate] | None, outcome: int | str, counts: Counts | None
    ) -> tuple[object, ...]:
        seq, sampled_ids, logits, logsumexps, error, aborted, *times = ANSWER(answer)
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
        if step is not None and not self._requests.endings.isdisjoint(sampled_ids):
            ends = ending_indices(step, sampled_ids)
        identities = self._requests.identities
        if identities is not None and updates:
            names = identities.take(updates, len(sampled_ids))
        return (UPDATE, seq, fault, ends, names, *times, outcome, counts)
