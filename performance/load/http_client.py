"""Keep-alive HTTP/1.1 connections for many answers that stream at once.

No task and no queue per request: an exchange is written to a connection, and its callbacks run as bytes arrive. Client
and server share the machine, so what the client does not do, the server can.
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
"""An idle connection older than this is not used again: the server may be about to close it."""
CONNECT_TIMEOUT_S = 10.0


class Exchange(Protocol):
    """One request and its answer. ``now`` is ``perf_counter()`` at the arrival of the bytes."""

    is_over: bool
    """True once nobody waits for the answer any more, for example after a timeout."""

    def attached(self, connection: Connection, now: float) -> None:
        """It is about to be written to ``connection``."""

    def status(self, code: int, request_id: str | None) -> None: ...
    def body(self, data: bytes, now: float) -> None: ...
    def end(self, now: float) -> None: ...
    def failed(self, kind: str, detail: str, now: float) -> None: ...


class Connection(asyncio.Protocol):
    """One connection: at most one exchange at a time. Over TLS it is a transport of the event loop, else a socket."""

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
        """The server may close a connection at any moment, even before it is used."""
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
        """Close at once; the exchange hears no more."""
        self._exchange = None
        self._pool.forget(self)
        transport, self._transport = self._transport, None
        if isinstance(transport, TimedSocket):
            transport.close()
        elif transport is not None:
            transport.abort()

    # A plain connection

    def opened(self, transport: TimedSocket) -> None:
        self._transport = transport

    def received(self, data: bytes, now: float) -> None:
        self._now = now
        self._feed(data)

    def lost(self, error: Exception | None, now: float) -> None:
        self._now = now
        self._closed(error)

    # asyncio.Protocol, over TLS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.received(data, perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        self.lost(error, perf_counter())

    def _feed(self, data: bytes) -> None:
        if self._exchange is None:  # nothing was asked: the server says goodbye
            self.abandon()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # An exception from a callback comes wrapped; its text is kept as the cause.
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
            self._finish()  # a body that lasts until the connection ends
        else:
            self._fail("disconnected", str(error or "the server closed the connection"))

    # httptools callbacks

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
    """Connections to one server, opened as they are needed. Lives in one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self._connecting: set[asyncio.Task[None]] = set()
        self.opened = 0

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Write ``data`` to an idle connection now, or to a new one as soon as it stands."""
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
        """A new connection. Raises ``OSError`` (``TimeoutError`` included)."""
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
        except asyncio.TimeoutError as error:  # not an OSError before Python 3.11
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        self.opened += 1
        return connection

    def _take_idle(self) -> Connection | None:
        """The connection used last; those idle for too long are closed."""
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
    """A short reason; asyncio's own text repeats the address."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    return error.strerror or str(error)


def _stamped(request: bytes) -> bytes:
    """The request with the header that says when it was sent: a server that heeds it counts its times from there."""
    return request.replace(b"\r\n", b"\r\nX-Request-Start: t=%.6f\r\n" % time(), 1)


def request_bytes(endpoint: Endpoint, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A whole HTTP/1.1 request."""
    lines = [
        f"{method} {endpoint.prefix}{path} HTTP/1.1",
        f"Host: {endpoint.authority}",
        "Accept: text/event-stream, application/json",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
