"""Runs fuzz requests against a real server and watches its event loop, its memory and its texts."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil

from support.http_fuzz import RequestDrawing, exchange
from support.server_process import ServerProcess
from support.stall_watch import MAX_STALL_S, Stall, StallWatch
from support.time_limits import time_limit

MAX_GROWTH_MIB = 24.0
"""Maximum growth of the server after the warm-up, in MiB. It is above 0, because an allocator may keep freed memory."""
WARM_UP = 0.3
"""Fraction of the requests that are sent before the growth of memory is measured."""
STALL_REPEATS = 2
"""Number of times that a batch is sent again if it stalls the event loop. A stall repeats if a request causes it, but
not if a busy machine causes it.
"""
BATCH = 200
"""Number of requests between two readings of the metrics."""
MAX_BLOCKS = 5
"""Maximum number of logged blocks of the event loop that the figures list."""
_CHECK = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "return_token_ids": True}


@dataclass
class HttpFindings:
    """The outcome of a run. ``failures`` and ``hangs`` contain the seeds of the requests."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0
    machine_stall_s: float = 0.0
    """The delay of a process that only slept during this period. It shows that the machine was busy with other work."""
    stalls: list[str] = field(default_factory=list)
    """Periods in which the event loop stalled for longer than the limit, and the machine did not."""
    blocks: list[str] = field(default_factory=list)
    """The longest blocks of the event loop that the server has logged, with the functions on the loop's stack."""
    growth_mib: float = 0.0
    text_is_equal: bool = False

    @property
    def is_good(self) -> bool:
        has_errors = self.failures or self.hangs or self.stalls
        return not has_errors and self.growth_mib <= MAX_GROWTH_MIB and self.text_is_equal

    def figures(self) -> str:
        """Returns the findings as one JSON line."""
        values = {
            "requests": self.requests,
            "statuses": {str(status): self.statuses[status] for status in sorted(self.statuses)},
            "operations": len(self.operations),
            "5xx": len(self.failures),
            "hangs": len(self.hangs),
            "longest_stall_ms": round(self.longest_stall_s * 1000, 1),
            "machine_stall_ms": round(self.machine_stall_s * 1000, 1),
            "stalls": self.stalls,
            "blocks": self.blocks,
            "growth_mib": round(self.growth_mib, 1),
            "text_is_equal": self.text_is_equal,
            "pass": self.is_good,
        }
        return json.dumps(values)


def fuzz_http(server: ServerProcess, requests: int, seed: int, clients: int = 6) -> HttpFindings:
    """Sends ``requests`` random requests from several clients, and returns the findings.

    Stops the profile that a random request may have started.
    """
    found, port = HttpFindings(), int(server.url.rsplit(":", 1)[1])
    drawing = RequestDrawing(server.get("/openapi.json"), server.get("/v1/models")["data"][0]["id"])
    expected = server.post("/v1/completions", _CHECK)["choices"]
    process, at_warm_up = psutil.Process(server.pid), 0

    def send(number: int) -> None:
        request = drawing.draw(number)
        found.operations[request.place] += 1
        try:
            answer = exchange(port, request, time_limit(60.0))
        except TimeoutError:
            found.hangs.append(f"{number}: {request.place}")
            return
        found.statuses[answer.status] += 1
        if answer.is_failure:
            found.failures.append(f"{number}: {request.place}: {answer.status} {answer.body[:200]!r}")

    with ThreadPoolExecutor(clients) as pool, StallWatch(server) as watch:
        for start in range(0, requests, BATCH):
            numbers = range(seed + start, seed + min(requests, start + BATCH))
            list(pool.map(send, numbers))
            found.requests += len(numbers)
            stall = watch.take()
            for _ in range(STALL_REPEATS):
                if stall.own_s <= MAX_STALL_S:
                    break
                list(pool.map(send, numbers))
                stall = min(stall, watch.take(), key=lambda each: each.own_s)
            _note_stall(found, stall, numbers)
            if not at_warm_up and start >= WARM_UP * requests:
                at_warm_up = process.memory_info().rss
    found.growth_mib = max(0, process.memory_info().rss - at_warm_up) / 2**20
    server.post("/profile/stop", {})
    server.wait_until_idle()
    found.blocks = _longest_blocks(server)
    found.text_is_equal = server.post("/v1/completions", _CHECK)["choices"] == expected
    return found


def _longest_blocks(server: ServerProcess) -> list[str]:
    events = sorted(server.events("event_loop_blocked"), key=lambda event: -float(event["loop_cpu_seconds"]))
    return [
        f"{each['seconds']} s, loop {each['loop_cpu_seconds']} s, process {each['cpu_seconds']} s: {each['functions']}"
        for each in events[:MAX_BLOCKS]
    ]


def _note_stall(found: HttpFindings, stall: Stall, numbers: range) -> None:
    found.longest_stall_s = max(found.longest_stall_s, stall.loop_s)
    found.machine_stall_s = max(found.machine_stall_s, stall.machine_s)
    if stall.own_s > MAX_STALL_S:
        milliseconds = f"{stall.loop_s * 1000:.0f} ms, the machine {stall.machine_s * 1000:.0f} ms"
        found.stalls.append(f"requests {numbers.start} to {numbers.stop - 1}: {milliseconds}")
