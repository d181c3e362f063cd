"""Limits the total time of an HTTP request to another host, even if the host sends a byte from time to time.

The timeout of a socket starts again with each byte, in the TLS handshake, the headers and the body. So a timer shuts
the socket down. The waiting call then ends with an error or with too few bytes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection


class DeadlineAdapter(HTTPAdapter):
    """An adapter of the library ``requests`` that shuts down all its sockets ``seconds`` after its creation. ``close``
    stops the timer.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.has_expired = False
        """True if the time is over. The received bytes may then be incomplete."""
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(max(seconds, 0.0), self._expire)
        self._timer.daemon = True
        self._timer.start()

    def get_connection_with_tls_context(self, *arguments: Any, **more: Any) -> Any:
        pool = super().get_connection_with_tls_context(*arguments, **more)
        base = _SecureConnection if pool.scheme == "https" else _PlainConnection
        pool.ConnectionCls = type("Connection", (base,), {"watch": staticmethod(self._watch)})
        return pool

    def close(self) -> None:
        self._timer.cancel()
        super().close()
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets.clear()

    def _watch(self, connected: socket.socket) -> None:
        # A duplicate of the descriptor can shut down the connection even after TLS has wrapped the socket.
        with self._lock:
            self._sockets.append(connected.dup())
            if self.has_expired:
                _shut(self._sockets[-1])

    def _expire(self) -> None:
        with self._lock:
            self.has_expired = True
            for each in self._sockets:
                _shut(each)


class _PlainConnection(HTTPConnection):
    watch: Callable[[socket.socket], None]

    def _new_conn(self) -> socket.socket:
        connected = super()._new_conn()
        self.watch(connected)
        return connected


class _SecureConnection(HTTPSConnection):
    watch: Callable[[socket.socket], None]

    def _new_conn(self) -> socket.socket:
        connected = super()._new_conn()
        self.watch(connected)
        return connected


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the host may have ended the connection
        connected.shutdown(socket.SHUT_RDWR)
