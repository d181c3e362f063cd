"""Sends the accepted requests that take the event loop longest, and reports how long each kind blocks it.

    python tests/long/worst_requests.py [--repeats 3] [--only TEXT]

Prints one JSON line. ``longest_stall_ms`` is the longest stall of the event loop over all kinds of requests. A delay
that the machine imposes does not count. Therefore the counted length of a stall is at most the processor time that the
server used during the stall. Each request is sent several times, and its shortest stall counts, because other programs
can only lengthen a stall. The exit code is 1 if a kind blocks the event loop for longer than ``--limit-ms``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from performance.models.vision import write_vision_model  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.server_process import running_server  # noqa: E402
from support.stall_watch import Stall, StallWatch  # noqa: E402
from support.worst_requests import (  # noqa: E402
    EMBEDDING_OVERRIDES,
    IMAGE_OVERRIDES,
    OVERRIDES,
    WorstRequest,
    slow_model,
    wide_embedding_model,
    worst_embedding_requests,
    worst_image_requests,
    worst_requests,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="only kinds whose name has this text")
    parser.add_argument("--max-tokens", type=int, default=2048, help="maximum length of outputs (default %(default)s)")
    parser.add_argument("--limit-ms", type=float, default=20.0)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    kinds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="worst_requests_") as scratch:
        folder = Path(scratch)
        write_vision_model(folder / "vision_model")
        servers = [
            (
                slow_model(folder),
                (*OVERRIDES, f"batch_config.folder={folder / 'batches'}"),
                worst_requests(arguments.max_tokens),
            ),
            (wide_embedding_model(folder), EMBEDDING_OVERRIDES, worst_embedding_requests()),
            (folder / "vision_model", IMAGE_OVERRIDES, worst_image_requests()),
        ]
        for number, (model, overrides, requests) in enumerate(servers):
            chosen = [request for request in requests if arguments.only in request.name]
            place = folder / str(number)
            place.mkdir()
            settings = [*overrides, f"model_config.model_path={model}", *arguments.overrides]
            if chosen:
                kinds |= _measure_all(place, settings, chosen, arguments.repeats)
    longest = max(kinds.values())
    slow = [name for name, figure in kinds.items() if figure > arguments.limit_ms]
    print(
        json.dumps({"longest_stall_ms": longest, "limit_ms": arguments.limit_ms, "too_long": slow, "kinds_ms": kinds})
    )
    return 1 if slow else 0


def _measure_all(folder: Path, settings: list[str], requests: list[WorstRequest], repeats: int) -> dict[str, float]:
    """Returns the longest stall of each kind of request, in milliseconds."""
    kinds = {}
    with running_server(folder, settings, forks=False) as server, StallWatch(server) as watch:
        port = int(server.url.rsplit(":", 1)[1])
        for request in requests:
            stall = min((_measure(request, port, watch) for _ in range(repeats)), key=_own)
            kinds[request.name] = round(1000 * stall.own_s, 1)
            print(_line(request.name, stall), file=sys.stderr)
    return kinds


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
    sys.exit(run_program(main))
