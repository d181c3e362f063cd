"""Defines sources of simulated requests: an open loop with given arrival times, and a closed loop of clients."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

__all__ = ["ClosedLoop", "OpenLoop", "SimulatedRequest", "Source"]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request to simulate. The request ends after ``output_tokens`` tokens, or after ``max_tokens`` if
    ``output_tokens`` is None.
    """

    prompt_token_ids: Sequence[int]
    max_tokens: int
    output_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    ttft_objective: float | None = None
    """Objective for the time to first token, in seconds. None: the objective of the config."""
    tbt_objective: float | None = None
    """Objective for the time between tokens, in seconds. None: the objective of the config."""


class Source(Protocol):
    """Interface of a load: provides requests one after the other, and the time at which the next one is sent."""

    requests: Sequence[SimulatedRequest]

    def next_due(self) -> float | None:
        """Returns the time at which the next request is sent.

        None means that no request is left, or that the next one is sent only after a running request has ended.
        """

    def pop(self) -> int:
        """Removes the next request from the source and returns its index in ``requests``."""

    def finished(self, now: float) -> None:
        """The server calls this when a client has its complete output, or when its request was rejected."""


class OpenLoop:
    """Sends each request at its arrival time, independently of other requests."""

    def __init__(self, requests: Sequence[SimulatedRequest], arrivals: Sequence[float]) -> None:
        if len(requests) != len(arrivals):
            raise ValueError(f"{len(requests)} requests and {len(arrivals)} arrival times")
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise ValueError("arrival times must not decrease")
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
    """Simulates several clients. Each client sends its next request when its previous request has ended."""

    def __init__(self, requests: Sequence[SimulatedRequest], clients: int) -> None:
        if clients < 1:
            raise ValueError(f"{clients} clients; the minimum is 1")
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
