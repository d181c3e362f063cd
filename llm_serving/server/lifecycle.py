"""Work for a client, done only as long as the client is there and the server is not stopping."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from starlette.types import Receive

from llm_serving.server.errors import ClientGoneError, UnavailableError

__all__ = ["ActiveRequests", "run_while_connected"]

T = TypeVar("T")


class ActiveRequests:
    """The requests under way, so that a stopping server can end them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        self._idle.clear()

    def discard(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    @contextlib.contextmanager
    def this_task(self) -> Iterator[None]:
        """Within it, the running task is a request under way. Raises UnavailableError when a stop ends it."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("only a task can be a request under way")
        self.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            raise UnavailableError("The server is stopping.", "stopping") from None
        finally:
            self.discard(task)

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits ``grace_s`` for those under way, then ends them with an error."""
        self.stopping = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except asyncio.TimeoutError:
            for task in tuple(self._tasks):
                task.cancel()


async def run_while_connected(active: ActiveRequests, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` to its end, or cancels it as soon as the client closes the connection.

    Raises ClientGoneError then, and UnavailableError when the server stops meanwhile. The request body must have
    been read: what ``receive`` still brings is only the end of the connection.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    active.add(task)
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        if task.cancelled() and active.stopping:
            raise UnavailableError("The server is stopping.", "stopping")
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
        active.discard(task)
        del task  # an error in it holds this frame: as a cycle, both would wait for the collector


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
