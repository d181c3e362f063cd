"""A flood of requests for a server whose queue takes few of them. Judges and counts the responses."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import Counter
from typing import Any

import psutil

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


class Client:
    """A connection that has at most one request under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.kind = 0
        self._began = 0.0
        self._data = b""

    def send(self, kind: int, request: bytes) -> None:
        """Sends request number ``kind`` of ``BODIES``."""
        self.kind, self._data, self._began = kind, b"", time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> tuple[int, bytes, bytes, float] | None:
        """Returns the status, the headers, the body, and the seconds since ``send``. None: the response is not
        complete.
        """
        piece = self.socket.recv(1 << 16)
        assert piece, "the server closed a connection"
        self._data += piece
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return None
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) < length:
            return None
        return int(head[9:12]), head.lower(), body, time.perf_counter() - self._began


class Flood:
    """Sends requests on many connections at the same time. ``expected`` are the texts of ``BODIES``."""

    def __init__(self, port: int, expected: list[str], num_connections: int) -> None:
        self._requests = [http_request(PATH, json.dumps(body).encode()) for body in BODIES]
        self._expected = expected
        self._clients = [Client(port) for _ in range(num_connections)]
        self.counts: Counter[str] = Counter()
        self.refusal_times: list[float] = []
        self.problems: list[str] = []

    def run(self, num_requests: int) -> None:
        """Sends the requests and counts the responses. Raises TimeoutError if no response arrives for ``SILENCE_S``."""
        num_sent = 0
        with selectors.DefaultSelector() as selector:
            for client in self._clients[:num_requests]:
                selector.register(client.socket, selectors.EVENT_READ, client)
                client.send(num_sent % len(BODIES), self._requests[num_sent % len(BODIES)])
                num_sent += 1
            while self.counts.total() < num_requests:
                ready = selector.select(SILENCE_S)
                if not ready:
                    raise TimeoutError(f"{num_sent - self.counts.total()} requests have no response")
                for key, _ in ready:
                    client = key.data
                    if (response := client.receive()) is None:
                        continue
                    self.judge(client.kind, *response)
                    if num_sent < num_requests:
                        client.send(num_sent % len(BODIES), self._requests[num_sent % len(BODIES)])
                        num_sent += 1

    def close(self) -> None:
        for client in self._clients:
            client.socket.close()

    def judge(self, kind: int, status: int, head: bytes, body: bytes, seconds: float) -> None:
        """Counts a response to request number ``kind``. ``head`` are its headers in lower case."""
        answer: dict[str, Any] = json.loads(body)
        if status == 200 and answer["choices"][0]["text"] == self._expected[kind]:
            self.counts["admitted"] += 1
        elif status == 429 and answer["error"]["code"] == "queue_full" and b"\r\nretry-after: " in head:
            self.counts["refused"] += 1
            self.refusal_times.append(seconds)
        else:
            self.counts["wrong"] += 1
            self.problems.append(f"request {kind}: {status} {body[:200]!r}")


def figures_of(server: ServerProcess, num_requests: int, num_connections: int) -> tuple[dict[str, Any], list[str]]:
    """Floods the server. Returns the figures and the problems."""
    expected = [server.post(PATH, body)["choices"][0]["text"] for body in BODIES]
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    flood = Flood(int(server.url.rpartition(":")[2]), expected, num_connections)
    began = time.monotonic()
    try:
        flood.run(num_requests)
    finally:
        flood.close()
    seconds = time.monotonic() - began
    server.wait_until_idle()
    growth = (process.memory_info().rss - before) / 2**20
    problems = flood.problems
    if server.get("/health/ready")["ready"] is not True:
        problems.append("the server is not ready after the flood")
    if not flood.counts["admitted"] or not flood.counts["refused"]:
        problems.append("the flood was not both served and refused")
    times = sorted(flood.refusal_times) or [0.0]
    return {
        "requests": num_requests,
        "connections": num_connections,
        **{name: flood.counts[name] for name in ("admitted", "refused", "wrong")},
        "refusal_p50_ms": round(1000 * times[len(times) // 2], 1),
        "refusal_p99_ms": round(1000 * times[len(times) * 99 // 100], 1),
        "refusal_max_ms": round(1000 * times[-1], 1),
        "seconds": round(seconds, 1),
        "growth_mib": round(growth, 1),
    }, problems
