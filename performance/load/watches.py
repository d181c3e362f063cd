"""Measures during a run: the server's metrics, the memory of processes, and the processor time of other processes."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import psutil

from performance.load.endpoint import Endpoint

__all__ = ["children_mib", "fetch_metrics", "fraction_of_others", "processor_seconds", "read_metrics", "sampled"]

MIB = 1 << 20
TIMEOUT_S = 5.0
"""Maximum seconds to wait for the server's metrics."""

Value = TypeVar("Value")


@contextmanager
def sampled(interval_s: float, sample: Callable[[], Value | None]) -> Iterator[list[Value]]:
    """Starts a thread that calls ``sample`` every ``interval_s`` seconds. Yields the list to which it adds the values.

    The list does not contain None.
    """
    values: list[Value] = []
    stop = threading.Event()

    def run() -> None:
        while True:
            value = sample()
            if value is not None:
                values.append(value)
            if stop.wait(interval_s):
                return

    thread = threading.Thread(target=run, name="samples", daemon=True)
    thread.start()
    try:
        yield values
    finally:
        stop.set()
        thread.join()


def children_mib() -> float:
    """Returns the resident memory of this process' children and their children, in MiB."""
    total = 0
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / MIB


def fetch_metrics(endpoint: Endpoint, headers: Mapping[str, str] | None = None) -> dict[str, float]:
    """Returns a server's metrics. The result is empty if the server has none or does not respond."""
    try:
        status, content_type, body = endpoint.get("/metrics", TIMEOUT_S, headers)
        return read_metrics(body.decode()) if status == 200 and content_type.startswith("text/plain") else {}
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return {}


def read_metrics(text: str) -> dict[str, float]:
    """Parses Prometheus' text format. The keys are names with labels: ``name{label="value"}``."""
    metrics = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            metrics[name] = float(value)
    return metrics


def processor_seconds() -> tuple[float, float, float]:
    """Returns seconds of all cores since the system's start: total, busy, and used by this process and its children."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    own = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            mine = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += mine.user + mine.system
    return busy + times.idle + times.iowait, busy, own


def fraction_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Returns the fraction of all cores' time that other processes took between two calls of ``processor_seconds``.

    The kernel's own work also counts, and the time of a hypervisor if the kernel reports it. A child process that ended
    between the two calls counts as another process.
    """
    total, busy, own = (later - earlier for earlier, later in zip(before, after, strict=True))
    return max(0.0, busy - own) / total if total > 0 else 0.0
