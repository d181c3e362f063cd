"""How fast the waiting queue drains, from what left it: when it pays to come back."""

from __future__ import annotations

__all__ = ["MAX_RETRY_AFTER_S", "DrainRate"]

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
