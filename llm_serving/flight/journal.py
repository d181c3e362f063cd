"""Decides what the flight recorder writes about each call of the scheduler, and when.

Calls of decoding with an unchanged batch are collected in a ``DecodeLog``, and later written as one record. Each other
call gets its own record. The journal writes its records together, in one system call that does not wait for the disk.
It writes every ``WRITE_INTERVAL_S`` seconds, at the end of a loop iteration with a fault, and when no step is in
flight.
"""

from __future__ import annotations

import math
from operator import attrgetter

from llm_serving.flight.decode_log import DecodeLog
from llm_serving.flight.facts import ending_indices, is_whole
from llm_serving.flight.format import Counts, Tag
from llm_serving.flight.requests import KnownRequests, TokenNames
from llm_serving.flight.segments import SegmentWriter
from llm_serving.flight.step_writer import StepWriter
from llm_serving.ipc.drafts import REJECTED
from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.request import Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

_TIME, _SCHEDULE, _UPDATE, _DECODING = int(Tag.TIME), int(Tag.SCHEDULE), int(Tag.UPDATE), int(Tag.DECODING)
"""The tags as plain integers. The encoder writes an integer ten times as fast as a member of an enumeration."""
WRITE_INTERVAL_S = 0.5
"""Maximum time in seconds between writes while steps are in flight."""
_NOW = -math.inf
"""Value of ``_due`` (the time of the next write) that makes the journal write its records at the end of the present
loop iteration.
"""
_MAX_ITERATIONS = 1024
"""Maximum number of loop iterations in one record of undisturbed decoding."""
_MAX_ENDED = 32
"""Approximate number of ended requests after which the journal forgets them, to limit its memory."""
_MAX_PENDING = 256
"""If this number of records waits to be written, the journal writes them before ``WRITE_INTERVAL_S`` has passed."""
_RESULT = attrgetter(
    "seq", "sampled_ids", "logits", "logsumexps", "error", "aborted", "queue_us", "graph_us", "sample_us"
)


class Journal:
    """Writes the calls of ``scheduler`` into ``segments``.

    The caller first passes each call of ``schedule`` and ``update`` to ``decode_log``. If the decode log does not
    accept a call, the caller passes it to ``record_step`` or ``record_result``. The methods raise OSError if the disk
    is full; the caller then calls ``pause``.
    """

    def __init__(self, scheduler: Scheduler, segments: SegmentWriter, names: TokenNames | None) -> None:
        self._scheduler = scheduler
        self._segments = segments
        self._requests = KnownRequests(names, self._forget_number)
        self._has_pseudonyms = names is not None
        self._sent: dict[int, ScheduledStep] = {}
        """The steps in flight, by number.

        For the journal, all steps of a run of undisturbed decoding are equal. So the run's latest step stands for each
        of its steps in flight.
        """
        self._steps = StepWriter()
        self.decode_log = DecodeLog(self._scheduler.counts, _MAX_ITERATIONS)
        self._num_steps = 0
        self._is_step_latest = False
        """True if the latest call of the scheduler was ``schedule`` and returned a step.

        If the next call is ``schedule`` and returns no step, the counts have not changed. The record of this call then
        omits the counts.
        """
        self._counted_requests: list[Request] | None = None
        self._counted_lens: list[int] = []
        """Lengths of the latest step's block tables. If the next step has the same requests and lengths, its record
        omits the scheduler's counts.
        """
        self._pending: list[object] = []
        self._due = _NOW
        self._now = 0.0

    @property
    def num_steps(self) -> int:
        """Number of scheduled steps that have been recorded."""
        return self._num_steps + self.decode_log.num_steps

    # The next methods record the calls of ``schedule`` and ``update`` that are not part of undisturbed decoding.

    def record_step(self, step: ScheduledStep, now: float) -> None:
        """Records that ``schedule`` returned a step.

        The record omits the scheduler's counts if they cannot have changed since the latest step. This holds if the
        step has the same sequences and the same lengths of block tables, and only ``schedule`` and ``update`` were
        called since then.
        """
        self._stop_log()
        self._num_steps += 1
        lens, counts = list(map(len, step.block_tables)), None
        if step.requests is not self._counted_requests or lens != self._counted_lens:
            counts = self._scheduler.counts()
        self._record_time(now)
        self._counted_requests, self._counted_lens = step.requests, lens
        self._is_step_latest = True
        self._sent[step.seq] = step
        self._pending.append((_SCHEDULE, self._steps.record(step, self._requests.number_of, lens), None, counts))
        if len(self._pending) >= 2 * _MAX_PENDING:
            self.flush()

    def record_result(self, result: StepResult, updates: list[RequestUpdate], now: float) -> None:
        """Records a call of ``update``."""
        self._stop_log()
        self._record_result(result, updates, len(updates), None, now)
        if result.error is not None:
            self._due = _NOW

    def record_failed_update(self, result: StepResult, error: Exception, now: float) -> None:
        """Records that ``update`` raised ``error``."""
        self._stop_log()
        self._record_result(result, [], type(error).__name__, self._scheduler.counts(), now)
        self._due = _NOW

    def record_no_step(self, now: float) -> None:
        """Records that ``schedule`` returned None, which ends the loop iteration."""
        self._stop_log()
        wakeup = self._scheduler.next_wakeup(now)
        counts = None if self._is_step_latest else self._scheduler.counts()
        self._is_step_latest = False
        self._record_time(now)
        self._pending.append((_SCHEDULE, None, wakeup, counts))
        is_last = counts is not None and not counts[4]  # ``counts[4]`` is the number of steps in flight
        if now >= self._due or is_last or len(self._pending) >= _MAX_PENDING:
            self.flush()
        self._start_log()

    # The following methods record calls other than ``schedule`` and ``update``.

    def begin(self) -> None:
        """Starts the first segment. Does nothing if a segment has been started before."""
        if self._segments.is_new:
            self._begin_segment()

    def record(self, record: list[object], now: float | None = None, *, urgent: bool = False) -> None:
        """Adds a record of a call other than ``schedule`` and ``update``.

        ``urgent`` marks the record of a fault. At the end of the loop iteration, the journal writes this record and all
        earlier ones to the file.
        """
        self._stop_log()
        self._is_step_latest = False
        self._counted_requests = None
        if now is not None:
            self._record_time(now)
        self._pending.append(record)
        if urgent:
            self._due = _NOW
        if len(self._pending) >= _MAX_PENDING:
            self.flush()

    def add_request(self, request: Request, *, refused: bool) -> tuple[int, bytes | None]:
        """Gives a new request a number. Returns this number and the packed pseudonyms of the request's tokens.

        The pseudonyms are None if the recording has none.
        """
        self._stop_log()
        num_requests = sum(self._scheduler.counts()[:2])
        if not refused and len(self._requests) > 2 * num_requests + _MAX_ENDED:
            self._requests.forget_ended()
        return self._requests.add(request, refused=refused)

    def number_of(self, request: Request) -> int:
        """Returns the number under which a request is recorded. The request must not have been forgotten."""
        return self._requests.number_of(request)

    def find(self, request_id: str) -> int | None:
        """Returns the number under which the request with this id is recorded, or None for an unknown id."""
        return self._requests.find(request_id)

    def release(self, request_ids: list[str]) -> None:
        """Forgets requests that move to another replica. A request that comes back gets a new number."""
        for request_id in request_ids:
            self._requests.forget(request_id)
        self._steps.renumber()

    def lose_steps(self) -> None:
        """Forgets the steps in flight, because their agent is lost."""
        self._sent.clear()

    # The following methods write the records to the files.

    def flush(self) -> None:
        """Writes all pending records, then starts the next segment if the present one is full.

        While the recording pauses, the records are dropped.
        """
        self.begin()
        self._take_run()
        self._due = self.decode_log.due = self._now + WRITE_INTERVAL_S
        records, self._pending = self._pending, []
        self._segments.write(records)
        if self._segments.wants_next(self._now) and not self._scheduler.has_ended_updates:
            self._begin_segment()

    def finish(self) -> None:
        """Writes all records, including those of a loop iteration that has not ended."""
        self._stop_log()
        self.flush()

    def pause(self, error: OSError) -> None:
        """Drops the pending records and stops writing for a while, because of ``error``."""
        self._stop_log()
        self._pending.clear()
        self._segments.pause(self._now, error)

    def close(self) -> None:
        """Closes the files without writing. May be called twice."""
        self.decode_log.stop()
        self.decode_log.take()
        self._segments.close()

    def _begin_segment(self) -> None:
        """Starts a segment, and forgets the steps that were recorded before.

        The records of a segment must not refer to steps in other segments.
        """
        self._stop_log()
        self._requests.forget_ended()
        self._steps = StepWriter()
        self._requests.settle_endings()
        self._counted_requests = None
        self._segments.begin(self._now, self._requests.numbers)

    def _forget_number(self, number: int) -> None:
        self._steps.forget(number)

    # The following methods record undisturbed decoding.

    def _start_log(self) -> None:
        """Starts the decode log if all steps in flight are decode steps of the same batch."""
        latest = next(reversed(self._sent.values()), None)
        if latest is None or latest.requests is not self._counted_requests:
            return
        seqs, steps = list(self._sent), list(self._sent.values())
        if (lens := self._steps.table_lens_of(steps)) is None:
            return
        if seqs == list(range(seqs[0], latest.seq + 1)):
            self.decode_log.due = self._due
            self.decode_log.begin(seqs[0], latest, lens, self._requests.endings, self._has_pseudonyms)

    def _take_run(self) -> None:
        """Removes the iterations from the decode log and appends one record of them to the records that wait to be
        written.
        """
        run = self.decode_log.take()
        if run is None:
            return
        names = None
        if self._requests.names is not None:
            names = [self._requests.names.take(updates, len(updates)) for updates in run.updates]
        steps = self._steps.record_run(run.first_step, run.growths)
        self._steps.go_to(run.latest, run.table_lens)
        queue_us, graph_us, sample_us = map(list, zip(*run.times_us, strict=True))
        self._pending.append(
            (
                *(_DECODING, steps, run.first_result, run.times, queue_us, graph_us, sample_us),
                *(run.counts, names, run.irregular),
            )
        )
        self._sent = dict.fromkeys(range(run.first_result + len(queue_us), run.latest.seq + 1), run.latest)
        self._counted_requests, self._counted_lens = run.latest.requests, run.table_lens
        self._now = run.times[-1]
        _, _, num_steps, has_ended = run.irregular[-1] if run.irregular else (0, 1, 1, True)
        self._is_step_latest = not has_ended and num_steps > 0

    def _stop_log(self) -> None:
        """Stops the decode log and appends one record of its iterations to the records that wait to be written.

        Called before any other record is added.
        """
        self.decode_log.stop()
        self._take_run()

    # The following methods append records of calls.

    def _record_time(self, now: float) -> None:
        if now != self._now:
            self._now = now
            self._pending.append((_TIME, now))

    def _record_result(
        self,
        result: StepResult,
        updates: list[RequestUpdate],
        outcome: int | str,
        counts: Counts | None,
        now: float,
    ) -> None:
        self._record_time(now)
        self._is_step_latest = False
        seq, sampled_ids, logits, logsumexps, error, aborted, *times = _RESULT(result)
        step = self._sent.pop(seq, None)
        fault: list[object] | None = None
        ends, step_names = [], None
        if (
            error is not None
            or aborted
            or step is None
            or not is_whole(step, sampled_ids, len(logits), len(logsumexps))
        ):
            signs = [token if token == NOT_FINITE else token >= 0 for token in sampled_ids]
            fault = [aborted, error is not None, [signs, len(logits), len(logsumexps)]]
        if step is not None and not self._requests.endings.isdisjoint(sampled_ids):
            ends = ending_indices(step, sampled_ids)
        names = self._requests.names
        if names is not None and updates:
            step_names = names.take(updates, len(sampled_ids))
        rejected = [index for index, token_id in enumerate(sampled_ids) if token_id == REJECTED]
        last = (rejected, result.bad_moves) if result.bad_moves else (rejected,) if rejected else ()
        self._pending.append((_UPDATE, seq, fault, ends, step_names, *times, outcome, counts, *last))
