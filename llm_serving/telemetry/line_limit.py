"""Limits how many lines of one log event are written in a second."""

from __future__ import annotations


class LineLimit:
    """Admits at most ``per_second`` lines in each second, and counts the lines that it does not admit.

    The object is not thread-safe: the caller must hold a lock.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = 0.0
        self._admitted = 0
        self.num_suppressed = 0
        """Number of lines that were not admitted since the last report by ``take_suppressed``."""

    def admits(self, now: float) -> bool:
        """Returns whether a line may be written at the time ``now``, in seconds. Counts the line."""
        if not 0 <= now - self._second < 1.0:
            self._second, self._admitted = now, 0
        if self._admitted < self._per_second:
            self._admitted += 1
            return True
        self.num_suppressed += 1
        return False

    def take_suppressed(self, now: float) -> int:
        """Returns how many lines were suppressed, and resets the number. Returns 0 until the present second is over."""
        if not self.num_suppressed or 0 <= now - self._second < 1.0:
            return 0
        number, self.num_suppressed = self.num_suppressed, 0
        return number
