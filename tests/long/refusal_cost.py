"""Measures the processor time of a refusal, with and without the early refusals of ``llm_serving/server/``.

    python tests/long/refusal_cost.py [--refusals 20000] [--connections 8]

A server with a fake engine refuses requests, which a client in another process sends on connections that stay open. A
URL with a query takes the normal path, so the same server serves both paths in turn. Prints a line for each kind of
refusal and path, and one JSON line. The times are those of the server's process, including the kernel's work for it.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from llm_serving.errors import QueueFullError  # noqa: E402
from support.access_keys import access_for, secret_of  # noqa: E402
from support.fake_engine import FakeEngine  # noqa: E402
from support.http_server import HttpServer, http_request, running  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.small_tokenizers import open_tokenizer, write_llama2_folder  # noqa: E402

PATH = "/v1/completions"
BODY = json.dumps({"prompt": list(range(256)), "max_tokens": 80, "temperature": 0.0, "stream": True}).encode()
ROUNDS = 5
"""Alternating measurements of each path. The result is their median."""
KEYS = {"queue_full": "open", "quota": "slow"}
"""The API key of each kind of refusal. The key ``slow`` may send one request per minute."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refusals", type=int, default=20_000, help="for each kind and path (default %(default)s)")
    parser.add_argument("--connections", type=int, default=8, help="open connections (default %(default)s)")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        run_client(options.client, options.connections)
        return 0
    with tempfile.TemporaryDirectory(prefix="refusal_cost_") as folder:
        engine = FakeEngine(open_tokenizer(write_llama2_folder(Path(folder))))
        access = access_for(Path(folder), "open", "slow requests_per_minute=1")
        with running(engine, access) as server:
            server.http.post(PATH, json={"prompt": "a"}, headers={"X-Api-Key": secret_of("slow")})
            engine.full = QueueFullError("64 requests are waiting and 0 can start; the queue takes 64. Try again.")
            command = [sys.executable, __file__, f"--connections={options.connections}", f"--client={server.port}"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                number = max(1, options.refusals // ROUNDS)
                figures = {kind: measured(server, client, kind, number) for kind in KEYS}
                assert client.stdin is not None
                client.stdin.close()
    print(json.dumps(figures))
    return 0


def measured(server: HttpServer, client: subprocess.Popen[str], kind: str, number: int) -> dict[str, float]:
    """Returns the microseconds of a refusal on both paths. ``number`` is the number of refusals of one measurement."""
    paths = {"early": PATH, "normal": f"{PATH}?"}
    times: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(ROUNDS):
        for name, path in paths.items():
            server.log.events.clear()
            server.engine.asked_for.clear()
            began = time.process_time()
            print(path, KEYS[kind], number, file=client.stdin, flush=True)
            assert client.stdout is not None
            assert client.stdout.readline() == "done\n"
            times[name].append(1e6 * (time.process_time() - began) / number)
    found = {name: round(statistics.median(each), 1) for name, each in times.items()}
    print(f"{kind}: {found['early']} us early, {found['normal']} us on the normal path", flush=True)
    return found


def run_client(port: int, num_connections: int) -> None:
    """Sends refused requests. Each line of the standard input has a path, a key and the number of refusals."""
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_connections)]
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        for line in sys.stdin:
            path, key, number = line.split()
            send(selector, http_request(path, BODY, f"Authorization: Bearer {secret_of(key)}"), int(number))
            print("done", flush=True)
    for connection in connections:
        connection.close()


def send(selector: selectors.BaseSelector, request: bytes, number: int) -> None:
    """Sends ``number`` requests, one at a time on each connection, and checks that all are refused."""
    connections = [key.data for key in selector.get_map().values()]
    left, waiting = number, min(number, len(connections))
    for connection in connections[:waiting]:
        connection.sendall(request)
    while waiting:
        for key, _ in selector.select():
            connection, data = key.data, b""
            while not data.endswith(b"}}"):
                data += connection.recv(65536)
            assert data.startswith(b"HTTP/1.1 429"), data
            left -= 1
            if left >= waiting:
                connection.sendall(request)
            else:
                waiting -= 1


if __name__ == "__main__":
    sys.exit(run_program(main))
