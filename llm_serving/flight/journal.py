"""What is written of the scheduler's calls, and when.

Turns in which nothing but decoding goes on are taken down by a ``TurnLog`` and become one record later; of any other
call there is a record at once. Records are written in one call, without waiting for the disk: when
``WRITE_INTERVAL_S`` has passed, at the end of a turn in which something went wrong, and when no step is in flight.
"""

from __future__ import annotations

import math
from operator import attrgetter

from llm_serving.flight.counts import Counts
from llm_serving.flight.facts import ending_indices, is_whole
from llm_serving.flight.format import Tag
from llm_serving.flight.identities import Identities
from llm_serving.flight.known_requests import KnownRequests
from llm_serving.flight.segments import SegmentWriter
from llm_serving.flight.step_writer import StepWriter
from llm_serving.flight.turn_log import turn_log
from llm_serving.request import Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["WRITE_INTERVAL_S", "Journal"]

_TIME, _SCHEDULE, _UPDATE, _TURNS = int(Tag.TIME), int(Tag.SCHEDULE), int(Tag.UPDATE), int(Tag.TURNS)
"""A plain number is written in a tenth of the time of an enumeration's member."""
WRITE_INTERVAL_S = 0.5
"""While steps are in flight and nothing goes wrong, records are written so often, together."""
_AT_ONCE = -math.inf
_MAX_TURNS = 1024
_MAX_PENDING = 256
"""So many turns, or so many records, are written whatever the clock says."""
_ANSWER = attrgetter(
    "seq", "sampled_ids", "logits", "logsumexps", "error", "aborted", "queue_us", "graph_us", "sample_us"
)
"""What is recorded of an answer."""


class Journal:
    """Writes the calls of ``scheduler`` into ``segments``. Raises OSError when the disk takes no more: the caller then
    calls ``pause``.

    Calls of ``update`` and ``schedule`` are offered to ``turns`` first, with ``answer``, ``step`` and ``end``; those
    that it does not take are told here.
    """

    def __init__(self, scheduler: Scheduler, segments: SegmentWriter, identities: Identities | None) -> None:
        self._scheduler = scheduler
        self._figures = scheduler.figures
        self._segments = segments
        self._requests = KnownRequests(identities, self._forgotten)
        self._names_tokens = identities is not None
        self._sent: dict[int, ScheduledStep] = {}
        """Steps in flight; for one that ``turns`` took down another of its batch may stand."""
        self._steps = StepWriter()
        self.turns = turn_log(self._figures.counts, _MAX_TURNS)
        self._num_steps = 0
        self._is_step_latest = False
        """The last call was ``schedule`` and gave a step."""
        self._seen_requests: list[Request] | None = None
        self._seen_lens: list[int] = []
        """Of the last step whose counts were taken. No requests: those of the next are taken."""
        self._pending: list[object] = []
        self._due = _AT_ONCE
        self._now = 0.0

    @property
    def num_steps(self) -> int:
        """Steps recorded."""
        return self._num_steps + self.turns.num_steps

    # Calls of every turn, that ``turns`` has not taken

    def note_step(self, step: ScheduledStep, now: float) -> None:
        """``schedule`` gave a step.

        Counts are taken when it has other sequences than the last, or more blocks, or another call than ``schedule``
        and ``update`` came before it, and when there is nothing to send: there alone can they be others.
        """
        self._leave_turns()
        self._num_steps += 1
        lens, counts = list(map(len, step.block_tables)), None
        if step.requests is not self._seen_requests or lens != self._seen_lens:
            counts = self._figures.counts()
        self._record_step(step, lens, counts, now)
        if len(self._pending) >= 2 * _MAX_PENDING:
            self.flush()

    def note_update(self, result: StepResult, updates: list[RequestUpdate], now: float) -> None:
        """``update`` took an answer."""
        self._leave_turns()
        self._record_answer(result, updates, len(updates), None, now)
        if result.error is not None:
            self._due = _AT_ONCE

    def note_failed_update(self, result: StepResult, error: Exception, now: float) -> None:
        """``update`` raised."""
        self._leave_turns()
        self._record_answer(result, [], type(error).__name__, self._figures.counts(), now)
        self._due = _AT_ONCE

    def note_nothing(self, now: float) -> None:
        """``schedule`` gave no step: the turn ends."""
        self._leave_turns()
        wakeup = self._scheduler.next_wakeup(now)
        counts = None if self._is_step_latest else self._figures.counts()
        self._is_step_latest = False
        self._note_time(now)
        self._pending.append((_SCHEDULE, None, wakeup, counts))
        is_last = counts is not None and not counts[4]  # nothing is in flight
        if now >= self._due or is_last or len(self._pending) >= _MAX_PENDING:
            self.flush()
        self._enter_turns()

    # Other calls

    def begin(self) -> None:
        """The first segment, before the first record."""
        if self._segments.is_new:
            self._begin_segment()

    def note(self, record: list[object], now: float | None = None, *, urgent: bool = False) -> None:
        """A record of a call that is not of every step. ``urgent``: something went wrong; it is written at the end of
        this turn, with all before it."""
        self._leave_turns()
        self._is_step_latest = False
        self._seen_requests = None
        if now is not None:
            self._note_time(now)
        self._pending.append(record)
        if urgent:
            self._due = _AT_ONCE
        if len(self._pending) >= _MAX_PENDING:
            self.flush()

    def know(self, request: Request, *, refused: bool) -> tuple[int, bytes | None]:
        """A new request's number, and the names of its tokens where there are any."""
        self._leave_turns()
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
        self._take_turns()
        self._due = self.turns.due = self._now + WRITE_INTERVAL_S
        records, self._pending = self._pending, []
        self._segments.write(records)
        if self._segments.wants_next(self._now):
            self._begin_segment()

    def finish(self) -> None:
        """Write all that was taken down, the turn under way too."""
        self._leave_turns()
        self.flush()

    def pause(self, error: OSError) -> None:
        """Nothing is written for a while."""
        self._leave_turns()
        self._pending.clear()
        self._segments.pause(self._now, error)

    def close(self) -> None:
        """Close the files; what was not written is lost. May be called twice."""
        self.turns.leave()
        self.turns.take()
        self._segments.close()

    def _begin_segment(self) -> None:
        """What records refer to begins anew, too."""
        self._leave_turns()
        self._requests.forget_ended()
        self._steps = StepWriter()
        self._requests.settle_endings()
        self._seen_requests = None
        self._segments.begin(self._now, self._requests.numbers)

    def _num_requests(self) -> int:
        return self._figures.num_running + self._figures.num_waiting

    def _forgotten(self, number: int) -> None:
        self._steps.forget(number)

    # Turns alike

    def _enter_turns(self) -> None:
        """From now on, if all that is in flight is of one batch that decodes."""
        latest = next(reversed(self._sent.values()), None)
        if latest is None or latest.requests is not self._seen_requests:
            return
        seqs, steps = list(self._sent), list(self._sent.values())
        if (lens := self._steps.table_lens_of(steps)) is None:
            return
        if seqs == list(range(seqs[0], latest.seq + 1)):
            self.turns.due = self._due
            self.turns.begin(seqs[0], latest, lens, self._requests.endings, self._names_tokens)

    def _take_turns(self) -> None:
        """A record of the turns taken down."""
        taken = self.turns.take()
        if taken is None:
            return
        latest, answered, sent, times, queue_us, graph_us, sample_us, growths, states, updates, odd_turns, lens = taken
        names = None
        if self._requests.identities is not None:
            names = [self._requests.identities.take(each, len(each)) for each in updates]
        run = self._steps.record_run(sent, growths)
        self._steps.go_to(latest, lens)
        self._pending.append((_TURNS, run, answered, times, queue_us, graph_us, sample_us, states, names, odd_turns))
        self._sent = dict.fromkeys(range(answered + len(queue_us), latest.seq + 1), latest)
        self._seen_requests, self._seen_lens = latest.requests, lens
        self._now = times[-1]
        _, _, num_steps, has_ended = odd_turns[-1] if odd_turns else (0, 1, 1, True)
        self._is_step_latest = not has_ended and num_steps > 0

    def _leave_turns(self) -> None:
        """Something else has happened: records of all that was taken down, before that of what it was."""
        self.turns.leave()
        self._take_turns()

    # Records of calls

    def _note_time(self, now: float) -> None:
        if now != self._now:
            self._now = now
            self._pending.append((_TIME, now))

    def _record_step(self, step: ScheduledStep, lens: list[int], counts: Counts | None, now: float) -> None:
        """``lens``: of its block tables when it was made; ``counts`` then."""
        self._note_time(now)
        self._seen_requests, self._seen_lens = step.requests, lens
        self._is_step_latest = True
        self._sent[step.seq] = step
        self._pending.append((_SCHEDULE, self._steps.record(step, self._requests.number_of, lens), None, counts))

    def _record_answer(
        self,
        answer: StepResult,
        updates: list[RequestUpdate],
        outcome: int | str,
        counts: Counts | None,
        now: float,
    ) -> None:
        self._note_time(now)
        self._is_step_latest = False
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
        if step is not None and not self._requests.endings.isdisjoint(sampled_ids):
            ends = ending_indices(step, sampled_ids)
        identities = self._requests.identities
        if identities is not None and updates:
            names = identities.take(updates, len(sampled_ids))
        self._pending.append((_UPDATE, seq, fault, ends, names, *times, outcome, counts))
