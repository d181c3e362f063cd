"""The waiting queue: bounded at its end, ordered by arrival."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from llm_serving.errors import QueueFullError
from llm_serving.scheduler.sequence import Sequence

__all__ = ["RequestQueue"]


class RequestQueue:
    """Sequences waiting for their first or, after a preemption, their next prefill, in order of arrival.

    Preempted ones arrived before everything that was never scheduled, so they are kept apart, at the front;
    every operation but their return is O(1), and so is removing a request from the middle.
    """

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._returned: list[Sequence] = []
        self._new: OrderedDict[int, Sequence] = OrderedDict()
        self.num_tokens = 0
        """Known tokens of the waiting sequences."""

    def __len__(self) -> int:
        return len(self._returned) + len(self._new)

    def __bool__(self) -> bool:
        return bool(self._returned or self._new)

    def check_room(self, num_tokens: int, num_free_rows: int) -> None:
        """Raises QueueFullError when one more request of ``num_tokens`` tokens is too much.

        Requests for which a row is free do not count: they leave the queue with the next steps.
        """
        waiting = len(self) - num_free_rows
        if waiting >= self._max_requests:
            raise QueueFullError(
                f"{len(self)} requests are waiting and {num_free_rows} can start; the queue takes"
                f" {self._max_requests} (scheduler_config.max_waiting_requests). Try again later."
            )
        if self._max_tokens is not None and waiting >= 0 and self.num_tokens + num_tokens > self._max_tokens:
            raise QueueFullError(
                f"requests with {self.num_tokens} tokens are waiting, this one has {num_tokens}; the queue takes"
                f" {self._max_tokens} tokens (scheduler_config.max_waiting_tokens). Try again later."
            )

    def append(self, sequence: Sequence) -> None:
        """Put a new request at the end."""
        self._new[sequence.arrival_index] = sequence
        self.num_tokens += sequence.request.num_tokens

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted request back where its arrival puts it: before all that never ran."""
        insort(self._returned, sequence, key=_arrival_index)
        self.num_tokens += sequence.request.num_tokens

    def peek(self) -> Sequence:
        """The first in line."""
        return self._returned[0] if self._returned else next(iter(self._new.values()))

    def pop(self) -> Sequence:
        """Take the first in line."""
        sequence = self._returned.pop(0) if self._returned else self._new.popitem(last=False)[1]
        self.num_tokens -= sequence.request.num_tokens
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is."""
        if self._new.pop(sequence.arrival_index, None) is None:
            self._returned.remove(sequence)
        self.num_tokens -= sequence.request.num_tokens


def _arrival_index(sequence: Sequence) -> int:
    return sequence.arrival_index
