"""Measures the host time of decode steps without a device: the time that the engine thread adds to a step.

The program uses the server's scheduler with its flight recorder, engine core, detokenizer, writer of step slots and
message codec. The device is simulated and completes a step immediately; its time is subtracted. With
``--evict MIB`` the simulated device reads this amount of memory in each step. The processor's caches are then as cold
as in a busy server.

With ``--replicas``, the engine has several replicas behind the router. The program prints the engine thread's processor
time for a step. It also prints how many replicas the thread can drive if a device needs ``--step-ms`` for each step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llm_serving.config import load_config
from llm_serving.engine.commands import Add
from llm_serving.engine.core import EngineCore
from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.flight.recorder import FlightRecorder, as_scheduler
from llm_serving.flight.setup import record
from llm_serving.scheduler.output import StepKind
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from performance.bench.against import add_against_options, compare_trees
from performance.bench.engine_parts import WARM_UP_STEPS, InstantExecutor, Stopwatch, fail, limits_for, request_of
from performance.bench.engine_replicas import measure_replicas, replicas_table
from performance.program import exits_with_errors, new_parser, parse_counts, write_json
from performance.terminal import format_table

PARTS = ("schedule", "write", "read", "update", "text", "recorder", "other")
RECORDING_BYTES = 64 << 20
"""Maximum size of the flight recording, in bytes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured host times, in microseconds, of steps with ``sequences`` running sequences."""

    sequences: int
    us_per_step: float
    parts: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "sequences": self.sequences,
            "us_per_step": self.us_per_step,
            "us_per_sequence": self.us_per_step / self.sequences,
            "parts_us": self.parts,
        }


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each number of sequences. Returns the exit code.

    With ``--against``, the function prints the ratios between two source trees instead.
    """
    options = _parser().parse_args(arguments)
    if options.against is not None:
        return compare_trees("performance/bench_engine_host.py", arguments, "sequences", "us_per_step")
    if options.replicas is not None:
        return _measure_replicas(options)
    figures = [measure(count, options.steps, options.repeats, options.evict) for count in options.sequences]
    fixed, slope = linear_fit(figures)
    print(_table(figures))
    print(f"\n  fit: {fixed:.0f} us per step + {slope:.2f} us per sequence")
    rows = [one.as_json() for one in figures]
    write_json(options.json, {"rows": rows, "fixed_us": fixed, "us_per_sequence": slope})
    return 0


def measure(sequences: int, steps: int, repeats: int, evict_mib: int = 0) -> Figures:
    """Measures the mean host time of ``steps`` decode steps, and of a step's parts, on each of ``repeats`` engines.

    Returns the medians over the engines.
    """
    runs = [_run(sequences, steps, evict_mib) for _ in range(repeats)]
    parts = {name: statistics.median(run[name] for run in runs) for name in PARTS}
    return Figures(sequences, statistics.median(run["total"] for run in runs), parts)


def _run(sequences: int, steps: int, evict_mib: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench_engine_host_") as folder:
        return _run_recorded(sequences, steps, evict_mib, Path(folder))


def _run_recorded(sequences: int, steps: int, evict_mib: int, folder: Path) -> dict[str, float]:
    stopwatch = Stopwatch()
    core, executor, recorder = _engine(sequences, steps, stopwatch, evict_mib, folder)
    while executor.last_kind is not StepKind.DECODE:
        core.step()
    for _ in range(WARM_UP_STEPS):
        core.step()
    gc.collect()
    gc.disable()
    stopwatch.seconds.clear()
    recorder.seconds = 0.0
    executor.device_seconds = 0.0
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    total = time.perf_counter() - start - executor.device_seconds
    gc.enable()
    recorder.close()
    stopwatch.seconds["recorder"] = recorder.seconds
    named = {name: 1e6 * stopwatch.seconds.get(name, 0.0) / steps for name in PARTS[:-1]}
    total_us = 1e6 * total / steps
    return {**named, "other": total_us - sum(named.values()), "total": total_us}


def _engine(
    sequences: int, steps: int, stopwatch: Stopwatch, evict_mib: int, folder: Path
) -> tuple[EngineCore, InstantExecutor, FlightRecorder]:
    """Returns an engine with ``sequences`` requests that do not end during the measurement."""
    max_tokens = steps + 2 * WARM_UP_STEPS
    limits, slots = limits_for(sequences, max_tokens)
    executor = InstantExecutor(slots, stopwatch, evict_mib)
    tokenizer = load_tokenizer(load_config("llama_tiny_cpu.yaml"))
    scheduler = Scheduler(limits)
    scheduler.schedule = stopwatch.wrap("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = stopwatch.wrap("update", scheduler.update)  # type: ignore[method-assign]
    recorder = record(scheduler, folder, RECORDING_BYTES, on_error=fail)
    core = EngineCore(
        as_scheduler(recorder),
        [(as_scheduler(recorder), executor)],
        lambda request: IncrementalDetokenizer.for_request(tokenizer, request.prompt_token_ids, request.sampling),
        EventLog(None),
        Metrics(process=False),
        lambda outputs: None,
        state_interval_s=1e9,
    )
    core._texts.outputs = stopwatch.wrap("text", core._texts.outputs)  # type: ignore[method-assign]
    for index in range(sequences):
        core.submit(Add(request_of(index, max_tokens)))
    return core, executor, recorder


def _measure_replicas(options: argparse.Namespace) -> int:
    """Prints a row for each number of replicas and of sequences. Returns the exit code."""
    rows = [
        measure_replicas(replicas, sequences, options.steps, options.repeats, options.step_ms / 1000)
        for sequences in options.sequences
        for replicas in options.replicas
    ]
    print(replicas_table(rows))
    write_json(options.json, {"rows": [row.as_json() for row in rows]})
    return 0


def linear_fit(figures: Sequence[Figures]) -> tuple[float, float]:
    """Fits a line to the step time over the number of sequences, by least squares of the relative errors.

    Returns microseconds per step and microseconds per sequence.
    """
    if len(figures) == 1:
        return 0.0, figures[0].us_per_step / figures[0].sequences
    times = np.array([one.us_per_step for one in figures])
    terms = np.array([[1.0, one.sequences] for one in figures])
    fixed, slope = np.linalg.lstsq(terms / times[:, None], np.ones(len(figures)), rcond=None)[0]
    return float(fixed), float(slope)


def _table(figures: Sequence[Figures]) -> str:
    header = ["sequences", "us/step", "us/sequence", *PARTS]
    rows = [
        [
            str(one.sequences),
            f"{one.us_per_step:.0f}",
            f"{one.us_per_step / one.sequences:.2f}",
            *(f"{one.parts[name]:.0f}" for name in PARTS),
        ]
        for one in figures
    ]
    return format_table(header, rows)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--sequences",
        type=parse_counts,
        default=(1, 4, 16, 64, 128, 256, 512),
        metavar="N,N",
        help="default 1,4,...,512",
    )
    parser.add_argument("--steps", type=int, default=200, help="measured decode steps (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="engines per row (default %(default)s)")
    parser.add_argument(
        "--replicas", type=parse_counts, metavar="N,N", help="measure engines with these numbers of replicas instead"
    )
    parser.add_argument("--step-ms", type=float, default=25.0, help="time of a replica's step (default %(default)s)")
    parser.add_argument("--evict", type=int, default=0, metavar="MIB", help="memory read in each step (default 0)")
    add_against_options(parser)
    return parser
