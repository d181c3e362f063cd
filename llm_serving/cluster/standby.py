"""Decides whether a server uses its nodes, so that they can be given back while there are no requests."""

from __future__ import annotations

import math
from collections.abc import Callable

_WEIGHT_OF_LATEST = 0.5


def is_wanted(standby: Standby | None) -> bool:
    """Return whether replicas may use nodes. Without a ``Standby``, they always may."""
    return standby is None or standby.is_wanted


class Standby:
    """Wants nodes from the first request until ``idle_s`` seconds after the last one. Learns how long a start takes.

    The engine thread calls ``note`` and ``note_refused``. Any thread may read the attributes. Times are seconds of the
    engine's clock.
    """

    def __init__(self, idle_s: float) -> None:
        self.is_wanted = False
        """Whether replicas may use nodes."""
        self.is_ready = False
        """Whether a replica has ready agents."""
        self.wake_s: float | None = None
        """Learnt time from the first request until a replica is ready. None: no start was seen."""
        self._idle_s = idle_s
        self._idle_since: float | None = None
        self._began: float | None = None
        """When nodes were wanted and no replica was ready."""
        self._retry_at = -math.inf
        """When the client of the last refused request may retry it."""
        self._wakers: list[Callable[[], None]] = []

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` in the engine thread when ``is_wanted`` changes."""
        self._wakers.append(wake)

    @property
    def due(self) -> float | None:
        """When to call ``note`` even if nothing happens. None: never."""
        return None if self._idle_since is None or not self.is_wanted else self._idle_since + self._idle_s

    def note(self, *, is_idle: bool, is_ready: bool, now: float) -> None:
        """Note whether there are no requests, and whether a replica is ready."""
        if not is_idle:
            self._idle_since = None
            self._want(True)
        elif self._idle_since is None:
            self._idle_since = max(now, self._retry_at)
        elif now - self._idle_since >= self._idle_s:
            self._want(False)
        self.is_ready = is_ready
        if not is_ready:
            self._began = None if not self.is_wanted else now if self._began is None else self._began
        elif self._began is not None:
            seconds = now - self._began
            self.wake_s = seconds if self.wake_s is None else self.wake_s + _WEIGHT_OF_LATEST * (seconds - self.wake_s)
            self._began = None

    def note_refused(self, now: float) -> None:
        """Note that a request was refused because no replica is ready. Call ``note`` next.

        Its client may retry it when the start is expected to end. Nodes are wanted until ``idle_s`` after that time.
        """
        self._retry_at = now + (self.expected_s(now) or 0.0)
        self._idle_since = None
        self._want(True)

    def awaits_retry(self, now: float) -> bool:
        """Return whether machines are needed only because a refused request may be retried."""
        return now < self._retry_at + (0.0 if self.is_ready else self._idle_s)

    def expected_s(self, now: float) -> float | None:
        """Return the expected seconds until a replica is ready. 0 if one is, None if it is not known."""
        began = self._began
        if self.is_ready or self.wake_s is None:
            return 0.0 if self.is_ready else None
        return max(0.0, self.wake_s - (0.0 if began is None else now - began))

    def _want(self, wanted: bool) -> None:
        if self.is_wanted != wanted:
            self.is_wanted = wanted
            for wake in self._wakers:
                wake()
