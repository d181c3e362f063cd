"""How fast the waiting queue drains, from what left it: when it pays to come back.

The waiting queue: bounded at its end, preempted requests in front, the others in the order of a strategy.

The rule of order is in ``queue_order``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llm_serving.errors import QueueFullError
from llm_serving.scheduler.keyed_heap import KeyedHeap
from llm_serving.scheduler.queue_order import PriorityOrder, QueueOrder
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences

__all__ = ["MAX_RETRY_AFTER_S", "DrainRate", "RequestQueue"]

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0

_KEEP = 1 - 1 / 64
"""What the past weighs against the next request that leaves: about the last 64 count."""


class DrainRate:
    """Seconds the queue had something in it, and requests and tokens that left it, the latest weighing most."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0

    def filled(self, now: float) -> None:
        """The queue was empty and is not any longer."""
        self._since = now

    def emptied(self) -> None:
        """Nothing is left; what passes until it fills again says nothing."""
        self._since = None

    def drained(self, num_tokens: int, now: float) -> None:
        """A request of ``num_tokens`` tokens left to run."""
        passed = 0.0 if self._since is None else max(0.0, now - self._since)
        self._since = now
        self._seconds = self._seconds * _KEEP + passed
        self._requests = self._requests * _KEEP + 1
        self._tokens = self._tokens * _KEEP + num_tokens

    def retry_after_s(self, num_requests: int, num_tokens: int) -> float:
        """Seconds until so many requests and so many tokens have left: 1 to MAX_RETRY_AFTER_S, 1 when none ever did."""
        if not self._requests:
            return MIN_RETRY_AFTER_S
        seconds = self._seconds * max(num_requests / self._requests, num_tokens / max(self._tokens, 1.0))
        return min(max(seconds, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def snapshot(self) -> list[Any]:
        """Returns the sums of the rate."""
        return [self._since, self._seconds, self._requests, self._tokens]

    def restore(self, state: list[Any]) -> None:
        """Restores what ``snapshot`` returned."""
        self._since, self._seconds, self._requests, self._tokens = state


class RequestQueue:
    """Sequences waiting for their first or, after a preemption, their next prefill.

    Every operation is O(log n), and so is removing a request from the middle.
    """

    def __init__(self, max_requests: int, max_tokens: int | None, order: QueueOrder | None = None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._returned: KeyedHeap[Sequence] = KeyedHeap()
        self._new: QueueOrder = PriorityOrder() if order is None else order
        self._deadlines: KeyedHeap[Sequence] = KeyedHeap()
        self._drain_rate = DrainRate()
        self._most_starts: int | None = None
        """The fewest that could start whenever it was asked since the queue was last empty; None: as many as rows."""
        self.num_tokens = 0
        """Known tokens of the waiting sequences."""
        self.has_tenants = False
        """Whether a request of a named tenant has ever come. While there is none, everybody is the one tenant ""."""

    def __len__(self) -> int:
        return len(self._returned) + len(self._new)

    def __bool__(self) -> bool:
        return bool(self._returned) or len(self._new) > 0

    @property
    def num_returned(self) -> int:
        """Preempted sequences that wait here."""
        return len(self._returned)

    @property
    def next_deadline(self) -> float | None:
        """When ``pop_expired`` will next have something to give."""
        return self._deadlines.key(self._deadlines.first())[0] if self._deadlines else None

    def check_room(self, num_tokens: int, num_free_rows: int) -> None:
        """Raises QueueFullError when one more request of ``num_tokens`` tokens is too much.

        Requests for which a row is free do not count, but see ``limit_starts``: they leave the queue with the next
        steps. A negative number of rows: so many more wait elsewhere, beyond the rows there.
        """
        num_startable = self.num_startable(num_free_rows)
        waiting = len(self) - num_startable
        if waiting >= self._max_requests:
            num_waiting, num_startable = len(self) - min(num_startable, 0), max(num_startable, 0)
            raise QueueFullError(
                f"{num_waiting} requests are waiting and {num_startable} can start; the queue takes"
                f" {self._max_requests} (scheduler_config.max_waiting_requests). Try again later.",
                retry_after_s=self._drain_rate.retry_after_s(waiting - self._max_requests + 1, 0),
            )
        if self._max_tokens is not None and waiting >= 0 and self.num_tokens + num_tokens > self._max_tokens:
            excess = self.num_tokens + num_tokens - self._max_tokens
            raise QueueFullError(
                f"requests with {self.num_tokens} tokens are waiting, this one has {num_tokens}; the queue takes"
                f" {self._max_tokens} tokens (scheduler_config.max_waiting_tokens). Try again later.",
                retry_after_s=self._drain_rate.retry_after_s(1, excess),
            )

    def num_startable(self, num_free_rows: int) -> int:
        """For how many a row is free, and nothing else is known to keep them from it."""
        return num_free_rows if self._most_starts is None else min(num_free_rows, self._most_starts)

    def limit_starts(self, most: int) -> None:
        """However many rows are free, only so many can start: for want of blocks, by admission, by the policy.

        It holds until the queue is empty, whatever is said later. What is short comes back a little at a time, and a
        door that opened wide each time would let in for every free row who then waits for something else.
        """
        self._most_starts = most if self._most_starts is None else min(self._most_starts, most)

    def append(self, sequence: Sequence) -> None:
        """Put a new request in."""
        if not self:
            self._drain_rate.filled(sequence.request.arrival_time)
        self._new.add(sequence)
        self.has_tenants = self.has_tenants or bool(sequence.request.tenant)
        self._enter(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted request back where its arrival puts it: before all that never ran."""
        self._returned.set(sequence, sequence.arrival_index)
        self._enter(sequence)

    def peek(self, now: float = 0.0) -> Sequence:
        """The first in line. Raises IndexError when nobody waits."""
        return self._returned.first() if self._returned else self._new.first(now)

    def pop(self, now: float = 0.0) -> Sequence:
        """Take the first in line, which starts."""
        sequence = self.peek(now)
        self.start(sequence, now)
        return sequence

    def start(self, sequence: Sequence, now: float) -> None:
        """Take a sequence that starts, the first in line or another; its tenant pays for its prompt, once."""
        if sequence in self._returned:
            self._returned.remove(sequence)
        else:
            self._new.start(sequence)
        self._drain_rate.drained(sequence.request.num_tokens, now)
        self._leave(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out that has ended, wherever it is."""
        if sequence in self._returned:
            self._returned.remove(sequence)
        else:
            self._new.remove(sequence)
        self._leave(sequence)

    def charge_output(self, sequence: Sequence, num_tokens: int = 1) -> None:
        """A running sequence got output tokens: its tenant pays for them. O(1)."""
        self._new.charge_output(sequence, num_tokens)

    def pop_expired(self, now: float) -> list[Sequence]:
        """Take out the requests whose deadline has come before their first token, the earliest deadline first."""
        expired = []
        while self._deadlines and self._deadlines.key(self._deadlines.first())[0] <= now:
            expired.append(self._deadlines.first())
            self.remove(expired[-1])
        return expired

    @property
    def first_preempted(self) -> Sequence | None:
        """The preempted one that arrived first, which is the first in line; O(1)."""
        return self._returned.first() if self._returned else None

    def preempted(self) -> Iterator[Sequence]:
        """The preempted ones that wait here, by arrival. O(n log n) in them; the first is ``first_preempted``."""
        return iter(sorted(self._returned, key=lambda sequence: sequence.arrival_index))

    def _enter(self, sequence: Sequence) -> None:
        request = sequence.request
        self.num_tokens += request.num_tokens
        if request.deadline is not None and request.first_token_time is None:
            self._deadlines.set(sequence, (request.deadline, sequence.arrival_index))

    def _leave(self, sequence: Sequence) -> None:
        self.num_tokens -= sequence.request.num_tokens
        if sequence in self._deadlines:
            self._deadlines.remove(sequence)
        if not self:
            self._drain_rate.emptied()
            self._most_starts = None

    def snapshot(self) -> dict[str, Any]:
        return {
            "returned": self._returned.snapshot(lambda sequence: sequence.arrival_index),
            "new": self._new.snapshot(),
            "deadlines": self._deadlines.snapshot(lambda sequence: sequence.arrival_index),
            "drain_rate": self._drain_rate.snapshot(),
            "most_starts": self._most_starts,
            "num_tokens": self.num_tokens,
            "has_tenants": self.has_tenants,
        }

    def restore(self, state: dict[str, Any], sequences: Sequences) -> None:
        self._returned.restore(state["returned"], sequences.__getitem__)
        self._new.restore(state["new"], sequences)
        self._deadlines.restore(state["deadlines"], sequences.__getitem__)
        self._drain_rate.restore(state["drain_rate"])
        self._most_starts, self.num_tokens = state["most_starts"], state["num_tokens"]
        self.has_tenants = state["has_tenants"]
