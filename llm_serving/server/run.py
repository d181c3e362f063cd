"""Runs the HTTP application on a listening socket, with uvicorn, until a stop event is set."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
import ssl
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn

from llm_serving.access.listening import BACKLOG
from llm_serving.access.tls import ServerTls
from llm_serving.server.app import ServerApp
from llm_serving.server.batches.endpoints import BATCH_ENDPOINTS
from llm_serving.server.batches.runner import BatchRunner
from llm_serving.server.early_refusals.refusals import EarlyRefusals
from llm_serving.server.http.dated_state import DatedState
from llm_serving.server.http.protocol import BoundedHttpProtocol, ConnectionRules
from llm_serving.server.http.proxies import TrustedProxies
from llm_serving.server.http.tls_listener import TlsListener
from llm_serving.server.limits import KEEP_ALIVE_S

CLOSE_S = 1.0
"""Seconds between the end of all requests and the end of the connections, so that clients can read the last bytes."""
RESERVED_FILES = 128
"""Number of file descriptors that are kept free of connections, for agents, logs and shared memory."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that is bound and listening, and the application that serves its connections."""

    sock: socket.socket
    app: ServerApp
    tls: bool = False
    """Whether connections are encrypted."""


async def serve(
    app: ServerApp,
    sock: socket.socket,
    stop: asyncio.Event,
    *,
    drain_s: float,
    tls: ServerTls | None = None,
    others: Sequence[Listener] = (),
) -> None:
    """Serves HTTP on ``sock`` until ``stop`` is set. The socket must be bound and listening. It is closed at the end.

    With ``tls``, connections to ``sock`` are encrypted. ``others`` are further listeners. The limit of connections is
    for all listeners together.

    After ``stop``, new requests get the status 503. Active requests have ``drain_s`` seconds to complete. Then they end
    with an error; a streamed response ends with an error event. The stop takes less than ``drain_s`` + 3 seconds. If
    the engine has stopped, active requests end immediately. The caller handles signals. Any event loop works; uvloop is
    the fastest.
    """
    state = app.state
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    rules = ConnectionRules(
        TrustedProxies(state.settings.trusted_proxies),
        max_connections=min(state.settings.max_connections, max(files - RESERVED_FILES, files // 2)),
        refused=state.metrics.connection_refused,
        received=state.loop_watch.wake,
    )
    listeners = [Listener(sock, app, tls=tls is not None), *others]
    watches = [each.watch for each in (state.access, tls) if each is not None and each.watch is not None]
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="error",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=math.ceil(CLOSE_S + 0.5),  # then uvicorn ends the connections that are left
    )
    active, loop_watch = state.active, state.loop_watch
    loop_watch.start(lambda: len(active) > 0, state.log, is_quiet=state.settings.is_quiet)
    for watch in watches:
        watch.start()
    batches = None if state.batches is None else BatchRunner(app, state.batches, BATCH_ENDPOINTS)
    context = tls.context if tls else None
    del state  # otherwise, the first version of the main model would stay in memory after a reload
    try:
        await _Server(config, app, rules, listeners, context, stop, drain_s, batches).serve()
    finally:
        if batches is not None:
            await batches.stop()
            batches.store.close()
        loop_watch.stop()
        for watch in watches:
            watch.stop()


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        app: ServerApp,
        rules: ConnectionRules,
        listeners: Sequence[Listener],
        tls: ssl.SSLContext | None,
        stop: asyncio.Event,
        drain_s: float,
        batches: BatchRunner | None,
    ) -> None:
        super().__init__(config)
        self.server_state = DatedState()
        self._batches = batches
        self._app = app
        self._rules = rules
        self._listeners = listeners
        self._tls = tls
        self._stop = stop
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            connect = partial(self._connection, listener.app, EarlyRefusals(listener.app))
            if listener.sock.family == socket.AF_UNIX:
                server = await loop.create_unix_server(connect, sock=listener.sock, backlog=BACKLOG)
            elif listener.tls and self._tls is not None:
                self.servers.append(self._tls_listener(listener.sock, self._tls, connect))  # type: ignore[arg-type]
                continue
            else:
                server = await loop.create_server(connect, sock=listener.sock, backlog=BACKLOG)
            self.servers.append(server)

    def _connection(self, app: ServerApp, refusals: EarlyRefusals) -> BoundedHttpProtocol:
        protocol = BoundedHttpProtocol(
            self._rules, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.app, protocol.refusals = app, refusals
        return protocol

    def _tls_listener(
        self, sock: socket.socket, tls: ssl.SSLContext, connect: Callable[[], BoundedHttpProtocol]
    ) -> TlsListener:
        sock.listen(BACKLOG)
        return TlsListener(self._rules, sock, tls, connect, lambda: len(self.server_state.connections))

    async def main_loop(self) -> None:
        if self._batches is not None:
            self._batches.start()
        await self._stop.wait()
        if self._batches is not None:
            await self._batches.stop()  # the stop does not wait for batches, which continue after the next start
        # The socket still listens. So new clients get a 503 with a reason instead of a refused connection.
        drain_s = 0.0 if self._app.state.has_ended else self._drain_s
        await self._app.state.active.drain(drain_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.get_running_loop().call_later(CLOSE_S, self._cut_off)
        await super().shutdown(sockets)
        cutting.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedHttpProtocol):
                connection.transport.abort()  # also discards data that the client has not received
