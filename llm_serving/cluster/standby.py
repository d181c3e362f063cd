"""Decides when a server uses its nodes. Without requests for some time, the server gives its nodes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_serving.routing.pools import PoolState

_WEIGHT_OF_LATEST = 0.5
"""Weight of the latest start in the mean of the seconds that a start takes."""


def is_wanted(standby: Standby | None) -> bool:
    """Returns True if replicas may use nodes now. Without a ``Standby``, they always may."""
    return standby is None or standby.is_wanted


class Standby:
    """Decides when nodes are used: from the first request until ``idle_s`` seconds after the last request.

    Also measures how long the agents take to start. With pools by prompt length, each pool has a ``Standby`` of its own
    for the nodes that name the pool.

    The engine thread calls ``note`` and ``note_refused``. Any thread may read the attributes. Times are seconds of the
    engine's clock.
    """

    def __init__(self, idle_s: float, pools: Iterable[str] = ()) -> None:
        """``pools`` are the names of the pools by prompt length."""
        self._pools = {name: Standby(idle_s) for name in pools}
        self._pool_states: Callable[[], Mapping[str, PoolState]] = dict
        """Returns the present state of each pool."""
        self.is_wanted = False
        """True if replicas may use nodes now."""
        self.is_ready = False
        """True if at least one replica has agents that are ready."""
        self.wake_s: float | None = None
        """Expected seconds from the first request until a replica is ready, learnt from earlier starts. None before the
        first start.
        """
        self._idle_s = idle_s
        self._idle_since: float | None = None
        self._began: float | None = None
        """The time at which the present start began. None while no start is in progress."""
        self._retry_at = -math.inf
        """The time at which the client whose request was refused last is expected to send the request again."""
        self._wakers: list[Callable[[], None]] = []

    def on_change(self, wake: Callable[[], None]) -> None:
        """Registers ``wake``. The engine thread calls it when ``is_wanted`` changes."""
        self._wakers.append(wake)

    def of_pool(self, name: str) -> Standby:
        """Returns the ``Standby`` for nodes that name this pool. An empty name stands for nodes that name no pool."""
        return self._pools[name] if name else self

    def watch_pools(self, states: Callable[[], Mapping[str, PoolState]]) -> None:
        """Lets each call of ``note`` read the states of the pools from ``states``."""
        self._pool_states = states

    @property
    def due(self) -> float | None:
        """The time at which ``note`` must be called even without an event, or None."""
        dues = [pool.due for pool in self._pools.values()]
        if self._idle_since is not None and self.is_wanted:
            dues.append(self._idle_since + self._idle_s)
        return min((due for due in dues if due is not None), default=None)

    def note(self, *, is_idle: bool, is_ready: bool, now: float) -> None:
        """Updates the decision. ``is_idle``: there are no requests. ``is_ready``: a replica has ready agents."""
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
        if self._pools:
            for name, state in self._pool_states().items():
                self._pools[name].note(is_idle=state.is_idle, is_ready=state.is_ready, now=now)

    def note_refused(self, now: float) -> None:
        """Records that a request was refused because no replica is ready. The caller must call ``note`` next.

        The client is expected to send the request again when a replica should be ready. The nodes stay in use until
        ``idle_s`` seconds after that time. The request's pool is not known, so this holds for the nodes of all pools.
        """
        for pool in self._pools.values():
            pool.note_refused(now)
        self._retry_at = now + (self.expected_s(now) or 0.0)
        self._idle_since = None
        self._want(True)

    def awaits_retry(self, now: float) -> bool:
        """Returns True if nodes stay in use only because the client of a refused request may send it again."""
        return now < self._retry_at + (0.0 if self.is_ready else self._idle_s)

    def expected_s(self, now: float) -> float | None:
        """Returns the expected seconds until a replica is ready: 0 if one is ready, None if no start was seen."""
        began = self._began
        if self.is_ready or self.wake_s is None:
            return 0.0 if self.is_ready else None
        return max(0.0, self.wake_s - (0.0 if began is None else now - began))

    def _want(self, wanted: bool) -> None:
        if self.is_wanted != wanted:
            self.is_wanted = wanted
            for wake in self._wakers:
                wake()
