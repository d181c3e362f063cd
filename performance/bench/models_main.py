"""Measures what it costs to start, put to sleep, wake and reload a model of a server with several models.

The server's main model is the embedded tiny model, and the measured model is a further model. All caches on disk are
empty at the beginning. The program prints:

1. the time of the cold start: the first load, which converts the weights and compiles the graph
2. alternately, the time of a load after an unload, and of a wake after a sleep
3. the memory (PSS) of all processes of the server before the first load, while the model serves, and while it sleeps
4. reloads of the model's weights while clients stream answers: the failed requests (the goal is 0), the time of a
   reload, and the time between tokens during the reloads over the time before. The machine needs memory for two
   versions of the model. ``--reload-clients 0`` leaves this part out.

    python performance/bench_models.py
    python performance/bench_models.py --config llama_tiny_cpu.yaml --rounds 5 --json FILE
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from performance.bench.model_reload import ReloadFigures, measure_reloads
from performance.load.endpoint import Endpoint
from performance.load.server_process import configured_server
from performance.program import exits_with_errors, write_json

START_TIMEOUT_S = 600.0
"""Maximum seconds of the server's start, and of each command or request."""
MAIN, NAME = "llama_tiny", "measured"
MIB = 1024 * 1024
SETTLE_INTERVAL_S, SETTLED_LOOKS, SETTLE_LIMIT_S = 1.0, 3, 120.0
"""The memory is measured every ``SETTLE_INTERVAL_S`` seconds. The memory counts as settled after ``SETTLED_LOOKS``
consecutive changes of less than 1 MiB, or after ``SETTLE_LIMIT_S`` seconds.
"""
_PARTS = {"Pss_Anon": "anonymous memory", "Pss_File": "files", "Pss_Shmem": "shared memory"}
"""Parts of the proportional set size in ``/proc/PID/smaps_rollup``, and their names in the output."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the times and the memory. Returns the exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2_135m_cpu.yaml", help="config of the measured model")
    parser.add_argument("--rounds", type=int, default=5, help="loads and wakes to measure (5)")
    parser.add_argument(
        "--reload-clients", type=int, default=8, metavar="N", help="requests in flight during the reloads (8)"
    )
    parser.add_argument("--reloads", type=int, default=3, help="reloads under load to measure (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.reloads < 1 or options.reload_clients < 0:
        parser.error("--rounds and --reloads must be at least 1, and --reload-clients at least 0")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # the server inherits it: no cached weights
        settings = [
            f"models_config.models=[{{name: {NAME}, config: {options.config}}}]",
            "serving_config.canary_interval_s=0",  # the canary's requests would take memory
        ]
        with configured_server("several models", "llama_tiny_cpu.yaml", settings, Path(folder), START_TIMEOUT_S) as at:
            figures = _measure(at, options.rounds)
            _print(figures)
            if options.reload_clients:
                reloads = _measure_reloads(at, options.reload_clients, options.reloads)
                _print_reloads(reloads)
                figures["reload"] = reloads.as_json()
    write_json(options.json, figures)
    return 0


def _measure(server: Endpoint, rounds: int) -> dict[str, Any]:
    """Returns the seconds of each kind of start, and the memory in bytes."""
    _answer(server, MAIN)
    before = _settled_memory()
    figures: dict[str, Any] = {"first_load_s": _command(server, "load"), "load_s": [], "wake_s": []}
    _answer(server, NAME)
    serving = _settled_memory()
    for _ in range(rounds):
        _command(server, "unload")
        figures["load_s"].append(_command(server, "load"))
        _command(server, "sleep")
        figures["wake_s"].append(_command(server, "wake"))
    _answer(server, NAME)
    _command(server, "sleep")
    asleep = _settled_memory()
    return {**figures, "memory_before": before, "memory_serving": serving, "memory_asleep": asleep}


def _measure_reloads(server: Endpoint, clients: int, reloads: int) -> ReloadFigures:
    _command(server, "load")
    _answer(server, NAME)
    return measure_reloads(server, NAME, clients, reloads, lambda: _command(server, "reload"))


def _print_reloads(figures: ReloadFigures) -> None:
    failed = sum(figures.failures.values())
    kinds = "".join(f", {number} x {kind}" for kind, number in figures.failures.items())
    print(f"failed requests            {failed:6} of {figures.requests} (goal 0){kinds}")
    print(f"requests in flight         {min(figures.in_flight):6} at least, at the begin of a reload")
    seconds = statistics.median(figures.reload_s)
    print(f"reload under load          {seconds:6.2f} s (median of {len(figures.reload_s)})")
    before, during = figures.tbt_before_ms.as_dict(), figures.tbt_during_ms.as_dict()
    for name in ("mean", "p50", "p99", "max"):
        first, second = before[name], during[name]
        if first and second:
            ratio = f"{second / first:.2f} x"
            print(f"time between tokens, {name:5} {first:6.1f} ms before, {second:.1f} ms during: {ratio}")


def _print(figures: dict[str, Any]) -> None:
    wake, load = statistics.median(figures["wake_s"]), statistics.median(figures["load_s"])
    first = figures["first_load_s"]
    print(f"cold start, empty caches   {first:6.2f} s")
    print(f"load after an unload       {load:6.2f} s (median of {len(figures['load_s'])})")
    print(f"wake after a sleep         {wake:6.2f} s (median of {len(figures['wake_s'])})")
    print(f"wake / cold start          {wake / first:6.3f}")
    print(f"wake / later load          {wake / load:6.2f}")
    before, serving, asleep = (figures[f"memory_{name}"] for name in ("before", "serving", "asleep"))
    taken, left = sum(serving.values()) - sum(before.values()), sum(asleep.values()) - sum(before.values())
    print(f"memory of the model        {taken / MIB:6.0f} MiB; sleep returns {100 * (1 - left / taken):.1f} %")
    for part in sorted(asleep):
        print(f"  left in {part:30} {(asleep[part] - before.get(part, 0)) / MIB:6.1f} MiB")


def _command(server: Endpoint, command: str) -> float:
    """Sends a command for the measured model. Returns the seconds until its response."""
    began = time.perf_counter()
    server.post(f"/v1/models/{NAME}/{command}", {}, START_TIMEOUT_S)
    return time.perf_counter() - began


def _answer(server: Endpoint, model: str) -> None:
    """Makes a model generate tokens, so that its memory is in use when it is measured."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}
    server.post("/v1/completions", body, START_TIMEOUT_S)


def _settled_memory() -> dict[str, int]:
    """Waits until the memory no longer grows, and returns it. It grows for some time, because agents allocate most of
    their KV cache after their start, while they have no steps.
    """
    until, memory = time.monotonic() + SETTLE_LIMIT_S, _memory()
    num_equal = 0
    while num_equal < SETTLED_LOOKS and time.monotonic() < until:
        time.sleep(SETTLE_INTERVAL_S)
        before, memory = memory, _memory()
        num_equal = num_equal + 1 if abs(sum(memory.values()) - sum(before.values())) < MIB else 0
    return memory


def _memory() -> dict[str, int]:
    """Returns the memory of the server process and of its agents in bytes, by process and kind of memory.

    The kinds are anonymous memory, files and shared memory. The sizes are proportional set sizes: if n processes map a
    page, each of them counts 1/n of it. So a page that only the server and its agents map counts once in the sum.
    """
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        who = "agents" if "agent" in process.cmdline() else "the server"
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            name, _, size = line.partition(":")
            if name in _PARTS:
                part = f"{who}: {_PARTS[name]}"
                found[part] = found.get(part, 0) + 1024 * int(size.split()[0])
    return found
