"""Sends large texts, token lists and bodies to a real server, and measures the stalls of its event loop.

    python tests/long/large_inputs.py [--set KEY=VALUE]

The texts are a letter, white space, combining marks and rare characters, of the largest size that the server reads and
of 50 MB. Prints a line for each input and one JSON line. Exits with 1 if an input stalls the loop for more than 100 ms
or gets a 5xx. The time for which the server waits for a processor is measured and subtracted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.http_fuzz import FuzzRequest, exchange  # noqa: E402
from support.server_process import ServerProcess, running_server  # noqa: E402
from support.stall_watch import MAX_STALL_S, StallWatch  # noqa: E402
from support.time_limits import time_limit  # noqa: E402

MIB = 2**20
LARGEST_READ = 8 * MIB - 1024
"""Size of a text in a body of almost ``serving_config.max_body_bytes``."""
SIZES = (64 * 1024, MIB, LARGEST_READ, 50_000_000)
UNITS = {
    "a letter": "a",
    "white space": " ",
    "words": "once upon ",
    "combining marks": "e\u0301\u0323",
    "rare": "𒀀🏴\u200d",
}


def inputs() -> Iterator[FuzzRequest]:
    """Yield the requests. The place of each names its input."""
    for name, unit in UNITS.items():
        for size in SIZES:
            text = unit * (size // len(unit.encode()))
            yield _post("/v1/completions", f"{size} bytes of {name}", {"prompt": text, "max_tokens": 1})
            yield _post("/tokenize", f"{size} bytes of {name}", {"prompt": text})
            message = {"role": "user", "content": text}
            yield _post("/v1/chat/completions", f"{size} bytes of {name}", {"messages": [message], "max_tokens": 1})
    for count in (10_000, 131_072, 1_500_000):
        yield _post("/detokenize", f"{count} token ids", {"tokens": [300] * count})
        yield _post("/v1/completions", f"{count} token ids", {"prompt": [300] * count, "max_tokens": 1})


def _post(path: str, what: str, body: object) -> FuzzRequest:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return FuzzRequest(f"{path}, {what}", f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    overrides = parser.parse_args().overrides
    with (
        tempfile.TemporaryDirectory(prefix="large_inputs_") as folder,
        running_server(Path(folder), overrides) as server,
    ):
        return run(server)


def run(server: ServerProcess) -> int:
    """Send every input and print what it did. Returns the exit code."""
    port, own_ms, machine_ms, longest_s, failures, number = int(server.url.rsplit(":", 1)[1]), 0.0, 0.0, 0.0, 0, 0
    with StallWatch(server) as watch:
        for request in inputs():
            began = time.monotonic()
            answer = exchange(port, request, time_limit(60.0))
            seconds, stall = time.monotonic() - began, watch.take()
            number += 1
            failures += answer.is_failure
            waited_s = max(stall.machine_s, stall.waited_s)
            own_ms, machine_ms = max(own_ms, (stall.loop_s - waited_s) * 1000), max(machine_ms, waited_s * 1000)
            longest_s = max(longest_s, seconds)
            print(f"{request.place}: {answer.status} after {seconds:.2f} s; stall {stall.loop_s * 1000:.0f} ms, "
                  f"the machine {waited_s * 1000:.0f} ms", flush=True)  # fmt: skip
    is_good = own_ms <= MAX_STALL_S * 1000 and not failures
    figures = {"inputs": number, "stall_ms": round(own_ms, 1), "machine_stall_ms": round(machine_ms, 1)}
    figures |= {"longest_response_s": round(longest_s, 2), "5xx": failures}
    print(json.dumps({**figures, "pass": is_good}))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
