"""A flood of requests for a server whose queue takes few of them. Judges and counts the responses.

Server and client share the cores, so the client does little until it has all responses. Then it judges each of them.
The time of a refusal ends when its bytes arrive in the client's kernel. The time until the client reads them is not the
server's, so it is a figure of its own.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import psutil

from llm_serving.telemetry.statistics import percentile
from performance.load.timed_socket import ANCILLARY_BYTES, arrival_time, request_time_stamps
from support.http_server import http_request
from support.server_process import ServerProcess

NUM_WAITING = 16
NUM_RUNNING = 8
SETTINGS = (
    f"scheduler_config.max_waiting_requests={NUM_WAITING}",
    f"model_config.decode_batch_size=[{NUM_RUNNING}]",
    "model_config.cpu_threads=1",  # on a machine with two cores, the server and the client need the other one
)
BODIES = [
    {"prompt": [1, 300 + number], "max_tokens": 24, "temperature": 0, "ignore_eos": True} for number in range(12)
]
PATH = "/v1/completions"
SILENCE_S = 60.0
"""Seconds without any response after which the run fails."""
PERCENTS = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)")


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response to request number ``kind`` of ``BODIES``. ``head`` are its headers in lower case."""

    kind: int
    status: int
    head: bytes
    body: bytes
    seconds: float
    """Seconds from the write of the request until the last bytes of the response arrived in the kernel."""
    unread_s: float = 0.0
    """Seconds from this arrival until the client read the bytes."""


class Client:
    """A connection that has at most one request under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        request_time_stamps(self.socket)
        self._kind = 0
        self._began = 0.0
        self._data = b""

    def send(self, kind: int, request: bytes) -> None:
        """Sends request number ``kind`` of ``BODIES``."""
        self._kind, self._data, self._began = kind, b"", perf_counter()
        self.socket.sendall(request)

    def receive(self) -> Response | None:
        """Reads from the socket. Returns None if the response is not complete."""
        piece, ancillary, _, _ = self.socket.recvmsg(1 << 16, ANCILLARY_BYTES)
        read, arrived = perf_counter(), arrival_time(ancillary)
        assert piece, "the server closed a connection"
        self._data += piece
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return None
        head = head.lower()
        length = _LENGTH.search(head)
        assert length is not None, f"a response without a length: {head!r}"
        missing = int(length[1]) - len(body)
        assert missing >= 0, f"bytes after a response: {body[missing:]!r}"
        if missing:
            return None
        return Response(self._kind, int(head[9:12]), head, body, arrived - self._began, max(0.0, read - arrived))


class Flood:
    """Sends requests on many connections at the same time. ``expected`` are the texts of ``BODIES``."""

    def __init__(self, port: int, expected: list[str], num_connections: int) -> None:
        self._requests = [http_request(PATH, json.dumps(body).encode()) for body in BODIES]
        self._expected = expected
        self._clients = [Client(port) for _ in range(num_connections)]
        self.counts: Counter[str] = Counter()
        self.refusals: list[Response] = []
        self.problems: list[str] = []

    def run(self, num_requests: int) -> list[Response]:
        """Sends the requests and returns the responses. Raises TimeoutError if no response arrives for ``SILENCE_S``.
        """
        responses: list[Response] = []
        num_sent = 0
        with selectors.DefaultSelector() as selector:
            for client in self._clients[:num_requests]:
                selector.register(client.socket, selectors.EVENT_READ, client)
                client.send(num_sent % len(BODIES), self._requests[num_sent % len(BODIES)])
                num_sent += 1
            while len(responses) < num_requests:
                ready = selector.select(SILENCE_S)
                if not ready:
                    raise TimeoutError(f"{num_sent - len(responses)} requests have no response")
                for key, _ in ready:
                    client = key.data
                    if (response := client.receive()) is None:
                        continue
                    responses.append(response)
                    if num_sent < num_requests:
                        client.send(num_sent % len(BODIES), self._requests[num_sent % len(BODIES)])
                        num_sent += 1
        return responses

    def close(self) -> None:
        for client in self._clients:
            client.socket.close()

    def judge(self, response: Response) -> None:
        """Counts a response."""
        kind, status, body = response.kind, response.status, response.body
        answer: dict[str, Any] = json.loads(body)
        if status == 200 and answer["choices"][0]["text"] == self._expected[kind]:
            self.counts["admitted"] += 1
        elif status == 429 and answer["error"]["code"] == "queue_full" and b"\r\nretry-after: " in response.head:
            self.counts["refused"] += 1
            self.refusals.append(response)
        else:
            self.counts["wrong"] += 1
            self.problems.append(f"request {kind}: {status} {body[:200]!r}")


def _percentiles_ms(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Returns the percentiles of times in milliseconds, as figures whose names begin with ``name``."""
    ordered = sorted(seconds) or [0.0]
    return {f"{name}_{part}_ms": round(1000 * percentile(ordered, percent), 1) for part, percent in PERCENTS.items()}


def figures_of(server: ServerProcess, num_requests: int, num_connections: int) -> tuple[dict[str, Any], list[str]]:
    """Floods the server. Returns the figures and the problems."""
    expected = [server.post(PATH, body)["choices"][0]["text"] for body in BODIES]
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    flood = Flood(int(server.url.rpartition(":")[2]), expected, num_connections)
    began = time.monotonic()
    try:
        responses = flood.run(num_requests)
    finally:
        flood.close()
    seconds = time.monotonic() - began
    for response in responses:
        flood.judge(response)
    server.wait_until_idle()
    growth = (process.memory_info().rss - before) / 2**20
    problems = flood.problems
    if server.get("/health/ready")["ready"] is not True:
        problems.append("the server is not ready after the flood")
    if not flood.counts["admitted"] or not flood.counts["refused"]:
        problems.append("the flood was not both served and refused")
    return {
        "requests": num_requests,
        "connections": num_connections,
        **{name: flood.counts[name] for name in ("admitted", "refused", "wrong")},
        **_percentiles_ms("refusal", [response.seconds for response in flood.refusals]),
        **_percentiles_ms("unread", [response.unread_s for response in flood.refusals]),
        "seconds": round(seconds, 1),
        "growth_mib": round(growth, 1),
    }, problems
