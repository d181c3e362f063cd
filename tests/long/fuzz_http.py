"""Sends requests that are drawn from the OpenAPI document, changed at random, or raw bytes, to a real server.

    python tests/long/fuzz_http.py --requests 20000 [--seed N] [--show NUMBER]

Prints one JSON line. Exits with 1 after any of these failures:

- A response had status 500 or more, or a whole request got no response.
- The event loop stalled for more than 100 ms. The delay that the machine itself imposes does not count.
- The server's memory grew after the warm-up.
- A text changed.

``--show`` prints the bytes of one request.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.http_fuzz import RequestDrawing  # noqa: E402
from support.http_fuzz_run import fuzz_http  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.server_process import running_server  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first request; each next is one more")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--show", type=int, metavar="NUMBER", help="print the bytes of this request instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz_http_") as folder:
        with running_server(Path(folder), arguments.overrides, forks=False) as server:
            if arguments.show is not None:
                drawing = RequestDrawing(server.get("/openapi.json"), server.get("/v1/models")["data"][0]["id"])
                sys.stdout.buffer.write(drawing.draw(arguments.show).data + b"\n")
                return 0
            found = fuzz_http(server, arguments.requests, arguments.seed)
        tracebacks = (Path(folder) / "stderr.txt").read_text(errors="replace").count("Traceback")
    for line in (*found.failures[:10], *found.hangs[:10]):
        print(line, file=sys.stderr)
    if tracebacks:
        print(f"{tracebacks} tracebacks on standard error", file=sys.stderr)
    print(found.figures())
    return 0 if found.is_good and not tracebacks else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
