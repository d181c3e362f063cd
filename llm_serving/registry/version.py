"""One version of a model in memory: its engine, its agents, and the leases of the HTTP requests that use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, TypeVar

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.registry.arbiter import Need

V = TypeVar("V")


class Lease(Generic[V]):
    """The right of one HTTP request to use a version. The version stays in memory until ``release``."""

    __slots__ = ("_version", "view")

    def __init__(self, version: RunningVersion[V]) -> None:
        self.view: V = version.view
        self._version: RunningVersion[V] | None = version

    def release(self) -> None:
        """Ends the lease. May be called twice."""
        version, self._version = self._version, None
        if version is not None:
            version.give_back()


class RunningVersion(Generic[V]):
    """A version of a model in memory. ``view`` is the object through which the HTTP edge uses the version.

    ``owned`` ends the agents. ``need`` is the planned memory, which the version occupies until ``stop`` has returned.
    """

    def __init__(self, number: int, engine: AsyncEngine, view: V, need: Need, owned: ExitStack) -> None:
        self.number = number
        self.engine = engine
        self.view = view
        self.need = need
        self.num_leases = 0
        self.is_stopping = False
        self.on_idle: Callable[[], None] = lambda: None
        """A function that is called when the last lease has been released."""
        self.checks: asyncio.Task[None] | None = None
        """The task that runs the canary of this version."""
        self._owned = owned
        self._end: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def lease(self) -> Lease[V]:
        """Returns a lease, which the caller must release."""
        self.num_leases += 1
        self._idle.clear()
        return Lease(self)

    def give_back(self) -> None:
        self.num_leases -= 1
        if not self.num_leases:
            self._idle.set()
            self.on_idle()

    async def drained(self) -> None:
        """Waits until no request uses the version."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends the engine and the agents. Requests that still run end with an error. May be called twice."""
        self.is_stopping = True
        self._idle.set()
        if self._end is None:
            self._end = asyncio.get_running_loop().create_task(self._stop())
        await asyncio.shield(self._end)

    async def _stop(self) -> None:
        if self.checks is not None:
            self.checks.cancel()
        await self.engine.stop()
        await asyncio.to_thread(self._owned.close)  # waits for processes, so it must not block the event loop
