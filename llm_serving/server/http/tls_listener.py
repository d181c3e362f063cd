"""Accepts encrypted connections. The limit of connections includes those whose TLS handshake is not complete.

asyncio's own servers report a connection only after its handshake. So clients that never complete a handshake could
open any number of connections. Therefore this module accepts the connections itself.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from llm_serving.server.http.protocol import ConnectionRules
from llm_serving.server.limits import HEADER_TIMEOUT_S

RETRY_S = 1.0
"""Seconds to wait after a failed ``accept``, for example because the process has too many open files."""


class TlsListener:
    """Accepts connections of a listening socket until ``close``. ``connect`` returns a new protocol for each
    connection.

    A handshake must end within ``HEADER_TIMEOUT_S``. If the maximum number of connections is reached, a new connection
    is closed without a handshake.
    """

    def __init__(
        self,
        rules: ConnectionRules,
        sock: socket.socket,
        tls: ssl.SSLContext,
        connect: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
    ) -> None:
        """``num_connections`` returns the number of connections that have completed their handshake."""
        self._rules = rules
        self._socket = sock
        self._tls = tls
        self._connect = connect
        self._num_connections = num_connections
        sock.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accepts no more connections, ends the unfinished handshakes, and closes the socket."""
        self._accepting.add_done_callback(lambda _: self._socket.close())
        for task in (self._accepting, *self._rules.handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until all handshakes have ended."""
        await asyncio.gather(self._accepting, *self._rules.handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop, rules = asyncio.get_running_loop(), self._rules
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            if self._num_connections() + len(rules.handshakes) >= rules.max_connections:
                rules.refused()
                connection.close()
                continue
            task = loop.create_task(self._encrypt(connection))
            rules.handshakes.add(task)
            task.add_done_callback(rules.handshakes.discard)

    async def _encrypt(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect, connection, ssl=self._tls, ssl_handshake_timeout=HEADER_TIMEOUT_S
            )
        except (OSError, asyncio.TimeoutError):  # the client did not complete the handshake
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
