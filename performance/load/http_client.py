"""Implements keep-alive HTTP/1.1 connections for many responses that stream at the same time.

An exchange is a request with its response. It has no task or queue of its own: arriving bytes directly call its
methods. This saves processor time, which matters because client and server share the machine.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from time import perf_counter, time
from typing import Protocol, cast

import httptools

from performance.load.endpoint import Endpoint
from performance.load.timed_socket import TimedSocket

MAX_IDLE_S = 2.0
"""A connection that was idle for more than this many seconds is not reused: the server may be about to close it."""
CONNECT_TIMEOUT_S = 10.0
"""Maximum seconds to connect to the server."""


class Exchange(Protocol):
    """Receives the response to one request. ``now`` is the time of ``perf_counter`` at which bytes arrived."""

    is_over: bool
    """True if the response is not needed any more, for example after a timeout."""

    def attached(self, connection: Connection, now: float) -> None:
        """The connection calls this method immediately before it writes the request."""

    def status(self, code: int, request_id: str | None) -> None: ...
    def body(self, data: bytes, now: float) -> None: ...
    def end(self, now: float) -> None: ...
    def failed(self, kind: str, detail: str, now: float) -> None: ...


class Connection(asyncio.Protocol):
    """A connection with at most one unanswered request.

    Without TLS it reads and writes its socket itself. With TLS the event loop does this.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | TimedSocket | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._has_length = False
        self._headers_done = False
        self._message_done = False
        self._keep_alive = False
        self._request_id: str | None = None
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """True if the connection can be used. The server may close it at any time, even before its first use."""
        if isinstance(self._transport, TimedSocket):
            return self._transport.is_open
        return self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: Exchange, data: bytes) -> None:
        assert self._exchange is None
        assert self._transport is not None
        self._exchange = exchange
        self._has_length = self._headers_done = self._message_done = False
        self._request_id = None
        exchange.attached(self, perf_counter())
        self._transport.write(_stamped(data))

    def abandon(self) -> None:
        """Closes the connection immediately. The current exchange gets no callback."""
        self._exchange = None
        self._pool.forget(self)
        transport, self._transport = self._transport, None
        if isinstance(transport, TimedSocket):
            transport.close()
        elif transport is not None:
            transport.abort()

    # The following methods are the callbacks of a connection without TLS.

    def opened(self, transport: TimedSocket) -> None:
        self._transport = transport

    def received(self, data: bytes, now: float) -> None:
        self._now = now
        self._feed(data)

    def lost(self, error: Exception | None, now: float) -> None:
        self._now = now
        self._closed(error)

    # The following methods are the callbacks of ``asyncio.Protocol`` for a connection with TLS.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        self.received(data, perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        self.lost(error, perf_counter())

    def _feed(self, data: bytes) -> None:
        if self._exchange is None:  # data that no request asked for: the server will close the connection
            self.abandon()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # If a callback raises, httptools raises another exception, whose context is the original exception.
            self._fail("bad http", str(error.__context__ or error))
            self.abandon()
            return
        if self._message_done:
            self._finish()

    def _closed(self, error: Exception | None) -> None:
        self._pool.forget(self)
        self._transport = None
        if self._exchange is None:
            return
        if self._headers_done and not self._has_length and error is None:
            self._finish()  # without a length, the end of the connection is the end of the body
        else:
            self._fail("disconnected", str(error or "the server closed the connection"))

    # httptools calls the following methods.

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif lower == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headers_done = True
        if self._exchange is not None:
            self._exchange.status(self._parser.get_status_code(), self._request_id)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.body(data, self._now)

    def on_message_complete(self) -> None:
        self._message_done = True
        self._keep_alive = self._parser.should_keep_alive()

    def _finish(self) -> None:
        exchange, self._exchange = self._exchange, None
        if self._transport is not None and self._keep_alive:
            self._pool.release(self)
        elif self._transport is not None:
            self._transport.close()
        if exchange is not None:
            exchange.end(self._now)

    def _fail(self, kind: str, detail: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.failed(kind, detail, self._now)


class ConnectionPool:
    """Keeps the connections to one server, and opens new ones on demand, in one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Writes ``data`` to an idle connection immediately, or to a new connection when it is open."""
        connection = self._take_idle()
        if connection is not None:
            connection.send(exchange, data)
            return
        task = asyncio.get_running_loop().create_task(self._send_on_new(exchange, data))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def release(self, connection: Connection) -> None:
        if connection.is_open:
            connection.idle_since = perf_counter()
            self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        for connection in list(self._idle):
            connection.abandon()
        self._idle.clear()
        for task in list(self._connecting):
            task.cancel()
        await asyncio.sleep(0)

    async def connect(self) -> Connection:
        """Opens a connection. Raises ``OSError`` (including ``TimeoutError``)."""
        loop = asyncio.get_running_loop()
        endpoint = self._endpoint
        connection = Connection(self)
        try:
            if self._tls is None:
                plain = TimedSocket.connect(endpoint.host, endpoint.port, connection)
                connection.opened(await asyncio.wait_for(plain, CONNECT_TIMEOUT_S))
            else:
                secure = loop.create_connection(lambda: connection, endpoint.host, endpoint.port, ssl=self._tls)
                await asyncio.wait_for(secure, CONNECT_TIMEOUT_S)
        except asyncio.TimeoutError as error:  # before Python 3.11, TimeoutError of asyncio is not an OSError
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        return connection

    def _take_idle(self) -> Connection | None:
        """Returns the idle connection that was used last.

        If it was idle for too long, closes all idle connections. Returns None if no idle connection can be used.
        """
        if not self._idle:
            return None
        connection = self._idle.pop()
        if perf_counter() - connection.idle_since <= MAX_IDLE_S:
            return connection
        for stale in (connection, *self._idle):
            stale.abandon()
        self._idle.clear()
        return None

    async def _send_on_new(self, exchange: Exchange, data: bytes) -> None:
        try:
            connection = await self.connect()
        except OSError as error:
            exchange.failed("connect", connect_error_text(error), perf_counter())
            return
        if exchange.is_over:
            self.release(connection)
        elif connection.is_open:
            connection.send(exchange, data)
        else:
            exchange.failed("connect", "the server closed the connection at once", perf_counter())


def connect_error_text(error: OSError) -> str:
    """Returns the reason why a connection failed. The address, which asyncio adds to the reason, is left out."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    return error.strerror or str(error)


def _stamped(request: bytes) -> bytes:
    """Adds the header X-Request-Start with the current time to a request, so that the server can measure the
    time since then.
    """
    return request.replace(b"\r\n", b"\r\nX-Request-Start: t=%.6f\r\n" % time(), 1)


def request_bytes(endpoint: Endpoint, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Returns a complete HTTP/1.1 request."""
    lines = [
        f"{method} {endpoint.prefix}{path} HTTP/1.1",
        f"Host: {endpoint.authority}",
        "Accept: text/event-stream, application/json",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
