"""Extends uvicorn's HTTP protocol with limits on headers, and with ``StreamChannel``, which writes to the socket."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from llm_serving.server.http.proxies import TrustedProxies
from llm_serving.server.limits import (
    HEADER_TIMEOUT_S,
    MAX_FRAMING_RATIO,
    MAX_HEADER_BYTES,
    MESSAGE_TIMEOUT_S,
    UNSENT_BYTES,
    WRITE_TIMEOUT_S,
)

RECEIVED_AT = "llm_serving.received_at"
"""Key of the ASGI scope for the time at which latencies of the request begin, in seconds of the monotonic clock.

This is the arrival of the request's first byte, or an earlier time that a trusted proxy states in ``X-Request-Start``.
"""
STREAM_CHANNEL = "llm_serving.stream_channel"
"""Key of the ASGI scope for the ``StreamChannel`` of the response."""

REQUEST_START = b"x-request-start"
"""Header in which a trusted proxy states the time when it sent the request, as a Unix time.

nginx sets it with ``proxy_set_header X-Request-Start "t=${msec}"``. There is no standard, so ``t=`` is optional, and
the unit may be seconds (with a fraction), milliseconds or microseconds. The size of the number shows the unit.
"""
MAX_AGE_S = 60.0
"""Maximum age in seconds of a time in ``X-Request-Start``. An older time is ignored, because clocks may differ."""

_STAMP = re.compile(rb"(?:t=)?([0-9]{9,17}(?:\.[0-9]{1,9})?)")
_UNITS = ((1e11, 1.0), (1e14, 1e3), (math.inf, 1e6))
"""(limit, divisor) for seconds, milliseconds and microseconds. A number below ``limit``, divided by ``divisor``, gives
seconds."""

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class ConnectionRules:
    """Settings of all connections."""

    proxies: TrustedProxies
    """The clients that may state an earlier start of a request in ``X-Request-Start``."""
    max_connections: int
    refused: Callable[[], None]
    """A function that is called for each connection beyond ``max_connections``."""
    received: Callable[[], None] = field(default=lambda: None)
    """A function that is called when a client sends bytes, before they are parsed."""
    handshakes: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks of connections whose TLS handshake is not complete. They count towards ``max_connections``, too."""


def age_of(value: bytes, now: float) -> float:
    """Returns the seconds from a value of ``X-Request-Start`` to ``now``, a Unix time.

    The result is 0 if the value is not a time, is in the future, or is older than ``MAX_AGE_S``.
    """
    match = _STAMP.fullmatch(value)
    if match is None:
        return 0.0
    stamp = float(match[1])
    age = now - stamp / next(unit for limit, unit in _UNITS if stamp < limit)
    return age if 0.0 < age <= MAX_AGE_S else 0.0


class ChannelUser(Protocol):
    """The receiver of a ``StreamChannel``'s events: the object that writes the response."""

    def drained(self) -> None:
        """The connection calls this method when the socket has accepted all written data, after ``is_full`` was True.
        """

    def lost(self) -> None:
        """The connection calls this method when the client has closed the connection."""


class StreamChannel:
    """Writes one streamed response directly to its socket. Each ``write`` is one HTTP chunk and one system call.

    A streamed response uses this class instead of ASGI's ``send``, which would have to wake a task for each piece of
    text. If ``is_full`` is True, the socket has not accepted all data, and the writer should wait for
    ``ChannelUser.drained``.
    """

    def __init__(self, protocol: BoundedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport

    @property
    def is_full(self) -> bool:
        return self._protocol.flow.write_paused

    def add_headers(self, headers: Iterable[Header]) -> None:
        """Adds headers to the response, which must not have begun. Both this channel and ASGI's ``send`` send them."""
        self._cycle.default_headers = [*self._cycle.default_headers, *headers]

    def attach(self, user: ChannelUser) -> None:
        """Reports the connection's events to ``user``. If the connection is already closed, calls ``user.lost`` now."""
        # With these limits, ``is_full`` becomes True as soon as the socket refuses a byte. A TLS transport of uvloop
        # needs a limit of 1, because a limit of 0 means "always full". The TLS transport also has its own buffer of 64
        # KiB, which the limit does not count.
        self._transport.set_write_buffer_limits(high=1 if self._protocol.scheme == "https" else 0)
        self._protocol.channel_user = user
        if self._cycle.disconnected or self._transport.is_closing():
            user.lost()

    def detach(self) -> None:
        """Stops reporting events to the ``ChannelUser``. If nothing was written, ASGI's ``send`` can send a response.
        """
        self._protocol.channel_user = None

    def start(self, headers: Iterable[Header], body: bytes, *, is_last: bool = False) -> None:
        """Writes status 200, the headers and the first HTTP chunk, in one system call."""
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.chunked_encoding = True
        lines = [b"HTTP/1.1 200 OK\r\n"]
        for name, value in (*cycle.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"transfer-encoding: chunked\r\n\r\n")
        self._write(b"".join(lines), body, is_last)

    def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Writes one HTTP chunk, which must not be empty. If ``is_last`` is True, ends the response."""
        self._write(b"", body, is_last)

    def _write(self, head: bytes, body: bytes, is_last: bool) -> None:
        end = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
        if not self._transport.is_closing():
            self._transport.write(b"%b%x\r\n%b%b" % (head, len(body), body, end))
        if is_last:
            self._complete()

    def _complete(self) -> None:
        """Marks the response as complete in uvicorn's objects, so that the connection can serve its next request."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()


class Refusals(Protocol):
    """The interface of ``early_refusals.EarlyRefusals``, which refuses requests by their headers alone."""

    def response(self, url: bytes, scope: Scope) -> Response | None:
        """Returns the response to a POST that is refused, or None if the application must be called."""


class _RefusedCycle(RequestResponseCycle):
    """Replaces uvicorn's object for a request that was refused before its body arrived.

    Its attributes state that the response is complete. So the connection discards the body and takes the next request.
    """

    def __init__(self) -> None:
        self.response_started = self.response_complete = True
        self.message_event = asyncio.Event()


class TrailerError(Exception):
    """The client sends headers after a chunked body."""


class PipelinedError(Exception):
    """The client sends a request before the response to the previous one is complete."""


_REFUSED = _RefusedCycle()


class BoundedHttpProtocol(HttpToolsProtocol):
    """An HTTP connection with limits on everything that a client sends except the body.

    - Headers that are too long (431) or arrive too slowly (408) close the connection.
    - A chunked body must not have trailers, and its framing must not be much longer than the body (400).
    - A message must be complete after ``MESSAGE_TIMEOUT_S``. A handler has a shorter time limit for a body that it
      reads, and responds with an error.
    - A client must read the written bytes within ``WRITE_TIMEOUT_S``.
    - Requests must not be pipelined. If a client sends a request before the present response is complete, the server
      discards the request and closes the connection after the response. If the client closes the connection before
      that, the server still notices it and ends the work for the response.
    """

    def __init__(self, rules: ConnectionRules, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rules = rules
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._message_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._new_body_bytes = 0
        self._body_bytes = 0
        self._framing_bytes = 0
        self._silent_bytes = 0
        self._is_discarding = False
        self._has_refused = False
        """True if a request in the bytes that are being processed was refused before its body arrived."""
        self.channel_user: ChannelUser | None = None
        self.refusals: Refusals | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if len(self.connections) + len(self._rules.handshakes) > self._rules.max_connections:
            self._rules.refused()
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1")
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_done()
        self._message_done()
        self._stop_write_timer()
        super().connection_lost(exc)
        if self.channel_user is not None:
            self.channel_user.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()
        if self.channel_user is not None:
            self.channel_user.drained()

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._rules.received()
        was_in_body = self._in_body
        self._has_refused = False
        self._new_body_bytes = 0
        super().data_received(data)
        if self._header_timer is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
        elif self._in_body:
            if self._message_timer is None:
                self._message_timer = self.loop.call_later(MESSAGE_TIMEOUT_S, self._refuse, b"408 Request Timeout")
            if was_in_body:
                self._count_framing(len(data))

    def on_message_begin(self) -> None:
        # If a request in the same received bytes was refused, the client has not waited for that response before this
        # request.
        if self._has_refused or (self.cycle is not None and not self.cycle.response_complete):
            raise PipelinedError
        super().on_message_begin()
        self.scope[RECEIVED_AT] = time.monotonic()  # type: ignore[literal-required]
        if self._header_timer is None:
            self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            raise TrailerError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_done()
        for name, value in self.headers:
            if name == REQUEST_START and self._rules.proxies.trusts(self.client):
                sent = time.monotonic() - age_of(value, time.time())
                self.scope[RECEIVED_AT] = min(self.scope[RECEIVED_AT], sent)  # type: ignore[literal-required]
        if not self._refuse_early():
            super().on_headers_complete()
            self.scope[STREAM_CHANNEL] = StreamChannel(self, self.cycle)  # type: ignore[literal-required]
        self._in_body = True
        self._body_bytes = self._framing_bytes = self._silent_bytes = 0

    def _refuse_early(self) -> bool:
        """Responds to a request whose headers suffice to refuse it. Returns False if the application must be called.

        Only usual requests are refused here: POST with HTTP/1.1, from a client that reads its responses.
        """
        parser = self.parser
        if self.refusals is None or parser.get_method() != b"POST" or parser.get_http_version() != "1.1":
            return False
        if self.flow.write_paused or self.transport.is_closing() or parser.should_upgrade():
            return False
        response = self.refusals.response(self.url, cast(Scope, self.scope))
        if response is None:
            return False
        self.cycle, self._has_refused = _REFUSED, True
        lines = [STATUS_LINE[response.status_code]]
        for name, value in (*self.server_state.default_headers, *response.raw_headers):
            lines += (name, b": ", value, b"\r\n")
        keep_alive = parser.should_keep_alive()
        lines += (b"\r\n" if keep_alive else b"connection: close\r\n\r\n", bytes(response.body))
        self.transport.write(b"".join(lines))
        if not keep_alive:
            self.transport.close()
        self.on_response_complete()
        return True

    def on_body(self, body: bytes) -> None:
        self._new_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._message_done()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Responds to data that is not HTTP, or that is refused. The parser cannot continue afterwards."""
        cycle = self.cycle
        if self._has_refused:  # the response is written already
            self._is_discarding = True
            self.transport.close()
        elif cycle is None or cycle.response_complete or self._in_body:
            self._refuse(b"400 Bad Request")
        else:  # the refused data come after a complete request, whose response is not complete yet
            self._is_discarding = True
            cycle.keep_alive = False  # the connection closes after the response

    def _count_framing(self, received: int) -> None:
        """Refuses a chunked body that is mostly framing: chunk headers, chunk extensions or trailers.

        Without this check, the parser would store an unfinished line of any length.
        """
        self._body_bytes += self._new_body_bytes
        self._framing_bytes += received - self._new_body_bytes
        self._silent_bytes = 0 if self._new_body_bytes else self._silent_bytes + received
        allowed = MAX_HEADER_BYTES + MAX_FRAMING_RATIO * self._body_bytes
        if self._silent_bytes > MAX_HEADER_BYTES or self._framing_bytes > allowed:
            self._refuse(b"400 Bad Request")

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._refuse, b"408 Request Timeout")

    def _headers_done(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _message_done(self) -> None:
        self._in_body = False
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _refuse(self, status: bytes) -> None:
        """Closes the connection. Before that, sends a response without a body, unless a response has already begun."""
        has_response = self._in_body and self.cycle.response_started
        self._headers_done()
        self._message_done()
        self._is_discarding = True
        if self.transport.is_closing():
            return
        if not has_response:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()
