"""uvicorn's HTTP protocol with bounds on the headers: their size, and the time they may take."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llm_serving.server.limits import HEADER_TIMEOUT_S, MAX_HEADER_BYTES

__all__ = ["RECEIVED_AT", "BoundedHttpProtocol"]

RECEIVED_AT = "llm_serving.received_at"
"""Key of the ASGI scope: when the request's first byte was read, on the monotonic clock. Latency counts from there."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request headers are too long (431) or too slow (408)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_done()
        super().connection_lost(exc)

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
        super().on_headers_complete()

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
