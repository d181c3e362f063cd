"""Sends the accepted requests that take the event loop longest, and reports how long each kind blocks it.

    python tests/long/worst_requests.py [--repeats 3] [--only TEXT]

Prints one JSON line. ``longest_stall_ms`` is the longest stall of the event loop over all kinds of requests. A delay
that the machine imposes does not count. Therefore a stall counts at most as the processor time that the server used
during the stall. Each request is sent several times, and its shortest stall counts, because other programs can only
lengthen a stall. The exit code is 1 if a kind blocks the event loop for longer than ``--limit-ms``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.server_process import running_server  # noqa: E402
from support.stall_watch import Stall, StallWatch  # noqa: E402
from support.worst_requests import OVERRIDES, WorstRequest, slow_model, worst_requests  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="only kinds whose name has this text")
    parser.add_argument("--max-tokens", type=int, default=2048, help="maximum length of outputs (default %(default)s)")
    parser.add_argument("--limit-ms", type=float, default=20.0)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    kinds = {}
    with tempfile.TemporaryDirectory(prefix="worst_requests_") as folder:
        model = f"model_config.model_path={slow_model(Path(folder))}"
        with (
            running_server(Path(folder), [*OVERRIDES, model, *arguments.overrides]) as server,
            StallWatch(server) as watch,
        ):
            port = int(server.url.rsplit(":", 1)[1])
            for request in worst_requests(arguments.max_tokens):
                if arguments.only in request.name:
                    stall = min((_measure(request, port, watch) for _ in range(arguments.repeats)), key=_own)
                    kinds[request.name] = round(1000 * stall.own_s, 1)
                    print(_line(request.name, stall), file=sys.stderr)
    longest = max(kinds.values())
    slow = [name for name, figure in kinds.items() if figure > arguments.limit_ms]
    print(
        json.dumps({"longest_stall_ms": longest, "limit_ms": arguments.limit_ms, "too_long": slow, "kinds_ms": kinds})
    )
    return 1 if slow else 0


def _measure(request: WorstRequest, port: int, watch: StallWatch) -> Stall:
    watch.take()
    request.send(port)
    return watch.take()


def _line(name: str, stall: Stall) -> str:
    loop, machine, busy = (round(1000 * seconds) for seconds in (stall.loop_s, stall.machine_s, stall.busy_s))
    return f"{name}: blocked {loop} ms, the machine {machine} ms, processor time {busy} ms"


def _own(stall: Stall) -> float:
    return stall.own_s


if __name__ == "__main__":
    sys.exit(main())
