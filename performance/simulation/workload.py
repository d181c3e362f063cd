"""What arrives when: the load test's own generator, a trace, a former load test, or clients in a closed loop."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

__all__ = ["ClosedLoop", "OpenLoop", "SimulatedRequest", "Source"]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One thing to ask, in tokens. ``output_tokens``: where its answer ends, None for never before ``max_tokens``."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    output_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    ttft_objective: float | None = None
    """Seconds."""
    tbt_objective: float | None = None
    """Seconds."""


class Source(Protocol):
    """Requests by their number, and when the next one is sent."""

    requests: Sequence[SimulatedRequest]

    def next_due(self) -> float | None:
        """When the next request is sent; None when none is sent before another ends, or at all."""

    def pop(self) -> int:
        """Take the number of that request."""

    def finished(self, now: float) -> None:
        """A client has its whole answer, or was refused."""


class OpenLoop:
    """Each request at its moment, whatever became of the others."""

    def __init__(self, requests: Sequence[SimulatedRequest], arrivals: Sequence[float]) -> None:
        if len(requests) != len(arrivals):
            raise ValueError(f"{len(requests)} requests and {len(arrivals)} arrival times")
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise ValueError("arrival times must not go down")
        self.requests = requests
        self._arrivals = arrivals
        self._next = 0

    def next_due(self) -> float | None:
        return self._arrivals[self._next] if self._next < len(self._arrivals) else None

    def pop(self) -> int:
        self._next += 1
        return self._next - 1

    def finished(self, now: float) -> None: ...


class ClosedLoop:
    """``clients`` that each send the next request as soon as they have the answer to their last."""

    def __init__(self, requests: Sequence[SimulatedRequest], clients: int) -> None:
        if clients < 1:
            raise ValueError(f"{clients} clients; the least is 1")
        self.requests = requests
        self._due = [0.0] * min(clients, len(requests))
        self._next = 0

    def next_due(self) -> float | None:
        return self._due[0] if self._due and self._next < len(self.requests) else None

    def pop(self) -> int:
        heapq.heappop(self._due)
        self._next += 1
        return self._next - 1

    def finished(self, now: float) -> None:
        heapq.heappush(self._due, now)
