"""Floods a real server with more requests than its queue takes: ``python tests/long/flood.py [--requests 10000]``.

A server with the embedded model has a queue for few requests. Clients on many connections each send the next request
as soon as they have a response. Every response must be one of two:

- a 200 with the text of the undisturbed server;
- a 429 with a ``Retry-After`` header, because the queue was full.

Prints one JSON line with the numbers of both, and with percentiles of two times. ``refusal`` is the time from the write
of a request until its refusal arrived in the kernel of the client. This time has a goal for an idle machine (check D1).
``unread`` is the time until the client has then read the refusal. The client shares the cores with the server, and
reads the responses of all connections in one thread. So this second time does not depend on the server alone.

The exit code is 1 after any other response, or if the server has not served or refused both kinds, or is not idle and
ready in the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from support.flood import NUM_RUNNING, NUM_WAITING, SETTINGS, figures_of  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.server_process import running_server  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the flood (default %(default)s)")
    parser.add_argument("--connections", type=int, default=64, help="requests at a time (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.connections <= NUM_WAITING + NUM_RUNNING:
        parser.error(f"--connections must exceed {NUM_WAITING + NUM_RUNNING}, or nothing is refused")
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), SETTINGS, forks=False) as server:
        figures, problems = figures_of(server, arguments.requests, arguments.connections)
    for problem in problems[:20]:
        print(problem)
    print(json.dumps({**figures, "pass": not problems}), flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
