"""When agents that were lost are started again, and when no more. Times are seconds of a clock of the caller's."""

from __future__ import annotations

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 10.0
STABLE_AFTER_S = 60.0
"""Agents that have been ready this long have earned a fresh count of restarts."""


def backoff_after(restarts: int) -> float:
    """Seconds to wait before another start, after so many restarts in a row."""
    return min(FIRST_BACKOFF_S * 2.0**restarts, LONGEST_BACKOFF_S)


class Restarts:
    """Of one group, which is told what becomes of it. At most ``limit`` in a row; none before it has been ready once:
    what keeps it from starting would do so again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        """In all."""
        self.in_a_row = 0
        """Since the group last was stable."""
        self.due_at: float | None = None
        """When to start again; None while it runs, and when given up."""
        self.is_given_up = False
        self.has_been_ready = False
        self._ready_at: float | None = None

    def started(self) -> None:
        """The agents are being started, the first time or again."""
        self.due_at = None

    def ready(self, now: float) -> None:
        """All agents are ready."""
        self._ready_at = now
        self.has_been_ready = True

    def lost(self, now: float) -> float | None:
        """An agent is lost, and its group with it: seconds until the next start, or None when it is given up."""
        if self._ready_at is not None and now - self._ready_at >= STABLE_AFTER_S:
            self.in_a_row = 0
        self._ready_at = None
        self.is_given_up = not self.has_been_ready or self.in_a_row >= self._limit
        if self.is_given_up:
            return None
        backoff = backoff_after(self.in_a_row)
        self.due_at = now + backoff
        self.count += 1
        self.in_a_row += 1
        return backoff
