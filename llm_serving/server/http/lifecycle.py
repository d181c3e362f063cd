"""Ends the work for an HTTP request when the client closes the connection or the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from starlette.types import Receive

from llm_serving.server.errors import ClientGoneError, UnavailableError

T = TypeVar("T")


class ActiveRequests:
    """The asyncio tasks of the requests that are being served, so that a stopping server can end them."""

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
        """Registers the running task for the ``with`` block. Raises UnavailableError if the server stops meanwhile."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("only a task can be an active request")
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
        """Refuses new requests, waits ``grace_s`` seconds for the active requests, then ends them with an error."""
        self.stopping = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except asyncio.TimeoutError:
            for task in tuple(self._tasks):
                task.cancel()


async def run_while_connected(active: ActiveRequests, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine ``work`` and returns its result. Cancels it if the client closes the connection first.

    Raises ClientGoneError if the client closed the connection, and UnavailableError if the server stops. The caller
    must have read the request body, so that ``receive`` can only report the end of the connection.
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
        del task  # breaks a reference cycle: an error in the task refers to this frame


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
