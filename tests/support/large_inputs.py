"""Sends large texts, token lists and bodies to a real server, and measures how long each stalls its event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from support.http_fuzz import FuzzRequest, exchange
from support.server_process import ServerProcess
from support.stall_watch import MAX_STALL_S, StallWatch
from support.time_limits import time_limit

MIB = 2**20
SIZES = (64 * 1024, MIB, 8 * MIB - 1024, 50_000_000)
"""Bytes of a text. With the third size, the body has almost ``serving_config.max_body_bytes``."""
COUNTS = (10_000, 131_072, 1_500_000)
"""Numbers of token ids in the requests that send token ids instead of a text."""
UNITS = {
    "a letter": "a",
    "white space": " ",
    "words": "once upon ",
    "combining marks": "e\u0301\u0323",
    "rare": "𒀀🏴\u200d",
}


@dataclass(frozen=True)
class LargeInput:
    """The outcome of one large request."""

    place: str
    status: int
    is_failure: bool
    seconds: float
    stall_s: float
    """Longest stall of the event loop during the request, in seconds."""
    waited_s: float
    """Time for which the server was ready but waited for a processor, in seconds."""

    @property
    def own_s(self) -> float:
        """The seconds of the stall, without the time for which the machine made the server wait for a processor."""
        return max(0.0, self.stall_s - self.waited_s)

    def text(self) -> str:
        times = f"stall {self.stall_s * 1000:.0f} ms, the machine {self.waited_s * 1000:.0f} ms"
        return f"{self.place}: {self.status} after {self.seconds:.2f} s; {times}"


def large_requests(sizes: Iterable[int] = SIZES, counts: Iterable[int] = COUNTS) -> Iterator[FuzzRequest]:
    """Yields requests with large inputs. The ``place`` of a request has the size and the kind of its input."""
    for name, unit in UNITS.items():
        for size in sizes:
            text, what = unit * (size // len(unit.encode())), f"{size} bytes of {name}"
            yield _post("/v1/completions", what, {"prompt": text, "max_tokens": 1})
            yield _post("/tokenize", what, {"prompt": text})
            message = {"role": "user", "content": text}
            yield _post("/v1/chat/completions", what, {"messages": [message], "max_tokens": 1})
    for count in counts:
        yield _post("/detokenize", f"{count} token ids", {"tokens": [300] * count})
        yield _post("/v1/completions", f"{count} token ids", {"prompt": [300] * count, "max_tokens": 1})


def send_large(server: ServerProcess, requests: Iterable[FuzzRequest]) -> Iterator[LargeInput]:
    """Sends the requests one after the other, and yields the outcome of each."""
    port = int(server.url.rsplit(":", 1)[1])
    with StallWatch(server) as watch:
        for request in requests:
            began = time.monotonic()
            answer = exchange(port, request, time_limit(60.0))
            seconds, stall = time.monotonic() - began, watch.take()
            waited_s = max(stall.machine_s, stall.waited_s)
            yield LargeInput(request.place, answer.status, answer.is_failure, seconds, stall.loop_s, waited_s)


def figures(found: list[LargeInput]) -> dict[str, Any]:
    """Returns the figures of a run for its JSON line."""
    stall_ms, failures = max(each.own_s for each in found) * 1000, sum(each.is_failure for each in found)
    return {
        "inputs": len(found),
        "stall_ms": round(stall_ms, 1),
        "machine_stall_ms": round(max(each.waited_s for each in found) * 1000, 1),
        "longest_response_s": round(max(each.seconds for each in found), 2),
        "5xx": failures,
        "pass": stall_ms <= MAX_STALL_S * 1000 and not failures,
    }


def _post(path: str, what: str, body: object) -> FuzzRequest:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return FuzzRequest(f"{path}, {what}", f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
