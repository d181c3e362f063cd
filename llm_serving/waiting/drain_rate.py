"""Measures how fast requests leave the waiting queue. This speed determines after which time a refused client should
retry.
"""

from __future__ import annotations

from typing import ClassVar

from llm_serving.scheduler.snapshot import Stateful

MIN_RETRY_AFTER_S = 1.0  # minimum seconds in `Retry-After` of a refused request
MAX_RETRY_AFTER_S = 30.0
"""Maximum seconds after which a client should try again. A longer pause could leave capacity unused, because the queue
may drain faster than before.
"""

_KEEP = 1 - 1 / 64
"""Factor of the moving average of the queue's speed. Each request that leaves the queue multiplies the weights of
earlier requests by this factor, so about the last 64 requests count.
"""


class DrainRate(Stateful):
    """Measures how fast requests and tokens leave the queue while it is not empty.

    Recent requests have the largest weight.
    """

    STATE: ClassVar[tuple[str, ...]] = ("_since", "_seconds", "_requests", "_tokens")

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0

    def start(self, now: float) -> None:
        """Continues the measurement. Called when the first request enters the empty queue."""
        self._since = now

    def stop(self) -> None:
        """Pauses the measurement, because the queue is empty.

        The time until the next request arrives is not counted.
        """
        self._since = None

    def note(self, num_tokens: int, now: float) -> None:
        """Records that a request with ``num_tokens`` tokens leaves the queue and starts."""
        passed = 0.0 if self._since is None else max(0.0, now - self._since)
        self._since = now
        self._seconds = self._seconds * _KEEP + passed
        self._requests = self._requests * _KEEP + 1
        self._tokens = self._tokens * _KEEP + num_tokens

    def retry_after_s(self, num_requests: int, num_tokens: int) -> float:
        """Estimates the seconds until ``num_requests`` requests and ``num_tokens`` tokens have left the queue. The
        result is from 1 to 30.
        """
        if not self._requests:
            return MIN_RETRY_AFTER_S
        seconds = self._seconds * max(num_requests / self._requests, num_tokens / max(self._tokens, 1.0))
        return min(max(seconds, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
