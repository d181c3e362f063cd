"""The intake: admits requests, queues them, and ends requests whose deadline passes.

The scheduler and the router both use it.
"""

from __future__ import annotations

from typing import Any

from llm_serving.errors import QueueFullError, RequestError
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences, Stateful
from llm_serving.telemetry.receipt import Phase, WaitingLine
from llm_serving.waiting.context_length import max_output_tokens
from llm_serving.waiting.drain_rate import DrainRate
from llm_serving.waiting.queue_order import KeyedHeap, QueueOrder
from llm_serving.waiting.shares import WaitingShares


class Intake(Stateful):
    """Has all requests that have not ended, and the queue of those that wait for a prefill.

    Preempted requests are at the front of the queue, in order of arrival. ``order`` sorts the requests that never ran.
    Operations cost O(log n).
    """

    STATE = (
        *("order", "num_arrivals", "num_tokens", "has_tenants"),
        *("_preempted", "_deadlines", "_max_starts", "_drain_rate"),
    )

    def __init__(self, limits: SchedulerLimits, order: QueueOrder) -> None:
        self.order = order
        """The waiting requests that never ran."""
        self.sequences: dict[str, Sequence] = {}
        """All requests that have not ended, by id."""
        self.num_arrivals = 0
        """Number of requests admitted since the start. This is also the arrival index of the next request."""
        self.num_tokens = 0
        """Known tokens of all waiting requests."""
        self.has_tenants = False
        """True once a request has named a tenant. Before that, all requests belong to the tenant "" (empty name)."""
        self.line = WaitingLine()
        """Remembers why the first waiting request could not start. The receipts (lists of times) of the waiting
        requests show this reason.
        """
        self._limits = limits
        self._preempted: KeyedHeap[Sequence] = KeyedHeap()
        self._deadlines: KeyedHeap[Sequence] = KeyedHeap()
        self._ended: list[RequestUpdate] = []
        self._drain_rate = DrainRate()
        self._max_starts: int | None = None
        self.shares = WaitingShares()
        """Number of waiting requests of each tenant."""

    def restore(self, state: Any, sequences: Sequences) -> None:
        super().restore(state, sequences)
        for sequence in (*self._preempted, *self.order):
            self.shares.enter(sequence.request.tenant)

    # The following methods add and end requests.

    def add(self, request: Request, num_free_rows: int) -> Sequence:
        """Admits a request.

        Raises RequestError, ContextLengthError or QueueFullError. In these cases, nothing has changed.
        """
        if request.request_id in self.sequences:
            raise RequestError(f"a request with the id {request.request_id!r} is being served", param="request_id")
        max_output = max_output_tokens(request, self._limits)
        self.check_limits(request.num_tokens, num_free_rows, request.tenant)
        sequence = Sequence(request, self.num_arrivals, max_output)
        self.num_arrivals += 1
        self.sequences[request.request_id] = sequence
        self.enqueue(sequence, None)
        return sequence

    def enqueue(self, sequence: Sequence, now: float | None) -> None:
        """Adds an admitted sequence that never ran to the queue.

        ``now`` is the present time if the request arrived earlier at a router. It is None if the request arrives now.
        """
        request = sequence.request
        if not self:
            self.line.moved(request.arrival_time if now is None else now)
            self._drain_rate.start(request.arrival_time)
        request.receipt.join(self.line, now)
        self.order.add(sequence)
        self.has_tenants = self.has_tenants or bool(request.tenant)
        self._enter_queue(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a preempted sequence to the queue, in front of all sequences that never ran."""
        self._preempted.set(sequence, sequence.arrival_index)
        self._enter_queue(sequence)

    def end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Ends a request that is not in the queue. Records the reason and the time in the request."""
        request = sequence.request
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finish_time = now
        request.receipt.enter(Phase.DONE, now)
        del self.sequences[request.request_id]

    def expire(self, now: float) -> list[Sequence]:
        """Ends and returns the waiting requests whose deadline passed before their first token."""
        expired: list[Sequence] = []
        while self._deadlines and self._deadlines.key(self._deadlines.first())[0] <= now:
            sequence = self._deadlines.first()
            expired.append(sequence)
            self.remove(sequence)
            self.end(sequence, FinishReason.ABORT, now)
            waited = now - sequence.request.arrival_time
            error = f"the request's deadline passed before its first token: it waited for {waited:.3f} s"
            self.note_ended([RequestUpdate(sequence.request, error=error)])
        return expired

    def note_ended(self, updates: list[RequestUpdate]) -> None:
        """Stores the last updates of ended requests until ``take_ended`` returns them."""
        self._ended += updates

    @property
    def has_ended_updates(self) -> bool:
        return bool(self._ended)

    def take_ended(self) -> list[RequestUpdate]:
        """Returns the last updates of requests that the scheduler has ended by itself. Returns each update once."""
        ended, self._ended = self._ended, []
        return ended

    # The following methods check the admission limits.

    def check_limits(self, num_tokens: int, num_free_rows: int, tenant: str = "", num_coming: int = 0) -> None:
        """Raises QueueFullError if the queue cannot accept another request of ``tenant`` with ``num_tokens`` tokens.

        Requests that can start do not count as waiting, because they leave the queue with the next steps.
        ``num_free_rows`` is the number of free batch rows. A router passes the free batch rows of its replicas minus
        the requests that wait at the replicas. If this number is negative, more requests wait at the replicas than can
        start. The excess counts as waiting. So do the ``num_coming`` requests that will be added before this one.
        """
        num_startable, max_requests = self.num_startable(num_free_rows), self._limits.max_waiting_requests
        waiting = len(self) + num_coming - num_startable
        is_full = waiting >= max_requests
        if is_full and not (self._limits.fairness and self.shares.may_enter(tenant, max_requests, waiting)):
            num_waiting, num_startable = waiting + max(num_startable, 0), max(num_startable, 0)
            raise QueueFullError(
                f"{num_waiting} requests are waiting and {num_startable} can start; the queue takes"
                f" {max_requests} (scheduler_config.max_waiting_requests). Try again later.",
                retry_after_s=self._drain_rate.retry_after_s(waiting - max_requests + 1, 0),
            )
        max_tokens, total = self._limits.max_waiting_tokens, self.num_tokens + num_tokens
        if max_tokens is not None and waiting >= 0 and total > max_tokens:
            raise QueueFullError(
                f"requests with {self.num_tokens} tokens are waiting, this one has {num_tokens}; the queue takes"
                f" {max_tokens} tokens (scheduler_config.max_waiting_tokens). Try again later.",
                retry_after_s=self._drain_rate.retry_after_s(1, total - max_tokens),
            )

    def queue_full(self, num_free_rows: int, tenant: str = "", num_coming: int = 0) -> QueueFullError | None:
        """Returns the error with which the shortest request would be refused now, or None. See ``check_limits``."""
        try:
            self.check_limits(1, num_free_rows, tenant, num_coming)
        except QueueFullError as error:
            # Without a traceback, the error does not keep the caller's variables alive.
            return error.with_traceback(None)
        return None

    def num_startable(self, num_free_rows: int) -> int:
        """Returns how many waiting requests can start: ``num_free_rows``, or the limit of ``limit_starts`` if lower."""
        return num_free_rows if self._max_starts is None else min(num_free_rows, self._max_starts)

    def limit_starts(self, num_starts: int) -> None:
        """Limits the result of ``num_startable`` to ``num_starts``, until the queue is empty.

        The scheduler calls this method if free blocks, admission or the policy permit fewer starts than there are free
        batch rows. After several calls, the lowest limit holds, even if blocks become free. Without the limit, the
        queue would accept a request for every free batch row, and most of these requests could not start.
        """
        self._max_starts = num_starts if self._max_starts is None else min(self._max_starts, num_starts)

    # The following methods read and change the queue.

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._preempted) + len(self.order)

    @property
    def num_preempted(self) -> int:
        """Number of preempted sequences in the queue."""
        return len(self._preempted)

    @property
    def first_preempted(self) -> Sequence | None:
        """The preempted sequence that arrived first, in O(1)."""
        return self._preempted.first() if self._preempted else None

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of the waiting requests without a first token, or None."""
        return self._deadlines.key(self._deadlines.first())[0] if self._deadlines else None

    def peek(self, now: float) -> Sequence:
        """Returns the first waiting sequence. Raises IndexError if the queue is empty."""
        return self._preempted.first() if self._preempted else self.order.first(now)

    def start(self, sequence: Sequence, now: float) -> None:
        """Removes a sequence from the queue because it starts. If it never ran, charges its prompt to its tenant."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self.order.start(sequence)
        self._drain_rate.note(sequence.request.num_tokens, now)
        self._leave_queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that leaves the queue without being started, for example because its client left."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self.order.remove(sequence)
        self._leave_queue(sequence)

    def _enter_queue(self, sequence: Sequence) -> None:
        request = sequence.request
        self.num_tokens += request.num_tokens
        self.shares.enter(request.tenant)
        if request.deadline is not None and request.first_token_time is None:
            self._deadlines.set(sequence, (request.deadline, sequence.arrival_index))

    def _leave_queue(self, sequence: Sequence) -> None:
        self.num_tokens -= sequence.request.num_tokens
        self.shares.leave(sequence.request.tenant)
        if sequence in self._deadlines:
            self._deadlines.remove(sequence)
        if not self:
            self._drain_rate.stop()
            self._max_starts = None
