"""Ends the work for an HTTP request when the client closes the connection or the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from starlette.types import Message, Receive

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
    must have read the request body, so that ``receive`` can only report the end of the connection. If ``work`` reads
    the body, ``receive`` must be ``ReadAhead.watch``.
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


class ReadAhead:
    """Reads a request body before its reader needs it, so that ``run_while_connected`` notices the end of the client.

    If ``max_bytes`` wait for the reader, the connection is not read. Then the end of the client is noticed only after
    the reader has taken a piece, or after ``MESSAGE_TIMEOUT_S``.
    """

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._max_bytes = receive, max_bytes
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_arrived, self._is_taken = asyncio.Event(), asyncio.Event()
        self.is_complete = False
        """True if the whole body has arrived."""

    async def watch(self) -> Message:
        """Keeps the next piece of the body for ``receive``. Returns the message of the connection."""
        while self._num_bytes >= self._max_bytes and not self.is_complete:
            self._is_taken.clear()
            await self._is_taken.wait()
        message = await self._receive()
        if message["type"] == "http.request":
            piece = message.get("body", b"")
            self._pieces.append(piece)
            self._num_bytes += len(piece)
            self.is_complete = not message.get("more_body")
            self._has_arrived.set()
        return message

    async def receive(self) -> Message:
        """Waits for the next piece of the body. Returns it in a message of the type ``http.request``.

        Another task must call ``watch`` meanwhile.
        """
        while not self._pieces and not self.is_complete:
            self._has_arrived.clear()
            await self._has_arrived.wait()
        piece = self._pieces.popleft() if self._pieces else b""
        self._num_bytes -= len(piece)
        self._is_taken.set()
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces) or not self.is_complete}
