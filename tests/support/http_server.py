"""An HTTP server of this project on a loopback port, in a thread, with a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import uvloop

from llm_serving.access.control import AccessControl
from llm_serving.access.tls import ServerTls
from llm_serving.server.app import create_app
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.run import Listener, serve
from llm_serving.server.state import ServerSettings
from llm_serving.telemetry.metrics import Metrics
from support.fake_engine import FakeEngine
from support.time_limits import time_limit

MAX_BODY_BYTES = 64 * 1024


class MemoryLog:
    """An event log that keeps its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        self.events.append((name, dict(fields)))

    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None:
        self.events.append((event, {"message": message, **fields}))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


class HttpServer:
    """A running server. A test may change the engine's script while the server runs in its own thread."""

    def __init__(
        self,
        engine: FakeEngine,
        access: AccessControl | None = None,
        batches: BatchStore | None = None,
        **settings: Any,
    ) -> None:
        self.engine = engine
        self.log = MemoryLog()
        self.metrics = Metrics(process=False)
        values: dict[str, Any] = {
            "max_prompt_tokens": 100,
            "max_context": engine.max_model_len,
            "vocab_size": engine.tokenizer.vocab_size,
            "max_body_bytes": MAX_BODY_BYTES,
        }
        all_settings = ServerSettings(**(values | settings))
        self.app = create_app(engine, self.log, self.metrics, all_settings, access, batches=batches)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=time_limit(10))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> HttpServer:
        self._thread.start()
        assert self._ready.wait(time_limit(5))
        return self

    def _run(self) -> None:
        loop = uvloop.new_event_loop()
        self._loop = loop
        loop.run_until_complete(self._serve())
        loop.run_until_complete(asyncio.sleep(0.02))  # the loop runs shortly, so that cancelled tasks can end
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._ready.set()
        await serve(self.app, self._socket, self._stop, tls=self.tls, others=self.others, drain_s=self.drain_s)

    drain_s = 0.3
    tls: ServerTls | None = None
    others: Sequence[Listener] = ()
    """Further listening sockets. A test must set them, like ``tls``, before it calls ``start``."""

    def request_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, timeout_s: float = 6) -> None:
        self._thread.join(time_limit(timeout_s))
        assert not self._thread.is_alive()
        self.http.close()

    def stop(self) -> None:
        self.request_stop()
        self.join()

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, body: Any) -> list[Any]:
        """Posts a request. Returns the JSON of each server-sent event, and ``[DONE]`` as text."""
        with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data:") for line in lines), lines
        texts = [line.removeprefix("data:").strip() for line in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]

    def raw(self, data: bytes) -> socket.socket:
        """Opens a raw connection to the server and sends ``data``."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=time_limit(10))
        connection.sendall(data)
        return connection


@contextlib.contextmanager
def running(
    engine: FakeEngine, access: AccessControl | None = None, batches: BatchStore | None = None, **settings: Any
) -> Iterator[HttpServer]:
    server = HttpServer(engine, access, batches, **settings).start()
    try:
        yield server
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 3) -> float:
    """Waits until ``condition`` is true. Returns the waiting time in seconds."""
    start, limit = time.monotonic(), time_limit(timeout_s)
    while not condition():
        assert time.monotonic() - start < limit, "did not come true"
        time.sleep(0.005)
    return time.monotonic() - start


def http_request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """Returns the bytes of a request. ``headers`` replace default headers of the same name."""
    usual = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    for header in headers:
        name, _, value = header.partition(": ")
        usual[name] = value
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in usual.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Reads status, headers and body of a response, by its length or until the connection closes."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        assert chunk, f"closed after {data!r}"
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    length = int(headers.get("content-length", 1 << 30))
    while len(body) < length:
        chunk = connection.recv(65536)
        if not chunk:
            break
        body += chunk
    return int(lines[0].split()[1]), headers, body
