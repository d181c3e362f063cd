"""uvicorn's HTTP protocol with bounds on the headers (their size, and the time they may take), and with a short way
for streamed responses to the socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llm_serving.server import request_start
from llm_serving.server.limits import HEADER_TIMEOUT_S, MAX_HEADER_BYTES

__all__ = ["RECEIVED_AT", "STREAM_CHANNEL", "BoundedHttpProtocol", "ChannelUser", "StreamChannel"]

RECEIVED_AT = "llm_serving.received_at"
"""Key of the ASGI scope: when the request's first byte was read, or was sent by its own word (``X-Request-Start``), on
the monotonic clock. Latency counts from there."""
STREAM_CHANNEL = "llm_serving.stream_channel"
"""Key of the ASGI scope: the ``StreamChannel`` of the response."""

Header = tuple[bytes, bytes]


class ChannelUser(Protocol):
    """Who writes to a ``StreamChannel``."""

    def drained(self) -> None:
        """Everything written has been taken by the socket, after a time in which it had not."""

    def lost(self) -> None:
        """The connection is closed."""


class StreamChannel:
    """The way of one streamed response to its socket: each ``write`` is one chunk and one system call, made at once.

    It stands in for ASGI's ``send`` from the response's start to its end, so there is no task to wake for a piece.
    While ``is_full`` the socket has not taken all that was written, and nothing more should be until ``drained``.
    """

    def __init__(self, protocol: BoundedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport

    @property
    def is_full(self) -> bool:
        return self._protocol.flow.write_paused

    def attach(self, user: ChannelUser) -> None:
        """From now on ``user`` is told what happens to the connection; ``lost`` at once if it is gone already."""
        self._transport.set_write_buffer_limits(high=0)  # full as soon as the socket leaves a byte behind
        self._protocol.channel_user = user
        if self._cycle.disconnected or self._transport.is_closing():
            user.lost()

    def detach(self) -> None:
        """The user hears no more, and ASGI's ``send`` may take over if nothing was written."""
        self._protocol.channel_user = None

    def start(self, headers: Iterable[Header], body: bytes, *, is_last: bool = False) -> None:
        """Status 200, the headers and the first chunk, in one write."""
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
        """One chunk, not empty; with ``is_last`` the response is complete."""
        self._write(b"", body, is_last)

    def _write(self, head: bytes, body: bytes, is_last: bool) -> None:
        end = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
        if not self._transport.is_closing():
            self._transport.write(b"%b%x\r\n%b%b" % (head, len(body), body, end))
        if is_last:
            self._complete()

    def _complete(self) -> None:
        """What uvicorn does at the end of a response: the next request of the connection may be answered."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request headers are too long (431) or too slow (408)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self.channel_user: ChannelUser | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_done()
        super().connection_lost(exc)
        if self.channel_user is not None:
            self.channel_user.lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.channel_user is not None:
            self.channel_user.drained()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._header_timer is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[RECEIVED_AT] = time.monotonic()  # type: ignore[literal-required]
        if self._header_timer is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._headers_done()
        for name, value in self.headers:
            if name == request_start.HEADER:
                sent = time.monotonic() - request_start.age_of(value, time.time())
                self.scope[RECEIVED_AT] = min(self.scope[RECEIVED_AT], sent)  # type: ignore[literal-required]
        super().on_headers_complete()
        self.scope[STREAM_CHANNEL] = StreamChannel(self, self.cycle)  # type: ignore[literal-required]

    def cut_off(self) -> None:
        """Closes the connection at once, without what is still to be sent."""
        self.transport.abort()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._refuse, b"408 Request Timeout")

    def _headers_done(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: bytes) -> None:
        self._headers_done()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
