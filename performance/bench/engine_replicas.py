"""Measures how many replicas one engine thread can drive, from the thread's processor time for a step.

Each replica has a scheduler with a flight recorder and an executor without agents, behind the real router. A loop
iteration completes one step of one replica. In a busy server, an iteration often completes steps of several replicas,
which costs less for each step. So the program measures the most expensive case.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from llm_serving.config import load_config
from llm_serving.engine.commands import Add
from llm_serving.engine.core import EngineCore
from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.executor.base import ExecutorEvent
from llm_serving.flight.recorder import as_scheduler
from llm_serving.flight.setup import record
from llm_serving.routing.router import Router
from llm_serving.routing.sources import replica_sources
from llm_serving.scheduler.output import StepKind
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from performance.bench.engine_parts import WARM_UP_STEPS, InstantExecutor, Stopwatch, fail, limits_for, request_of
from performance.terminal import format_table

RECORDING_BYTES = 4 << 20
"""Maximum size of the recording of a replica."""


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """The processor time that the engine thread needs for a step, if the thread drives several replicas."""

    replicas: int
    sequences: int
    """Sequences of each replica."""
    us_per_step: float
    drives: float
    """Number of replicas that one engine thread can drive, if a device needs ``step_s`` seconds for each step."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _InTurn:
    """Polls one executor at each call, in rotation."""

    def __init__(self, executors: Sequence[InstantExecutor]) -> None:
        self._executors = executors
        self._numbers = count()

    def __call__(self, timeout_s: float | None) -> list[tuple[int, ExecutorEvent]]:
        index = next(self._numbers) % len(self._executors)
        return [(index, event) for event in self._executors[index].poll(timeout_s)]


def measure_replicas(replicas: int, sequences: int, steps: int, repeats: int, step_s: float) -> ReplicaFigures:
    """Measures ``steps`` decode steps of each replica, on ``repeats`` engines. Returns the median of the engines.

    ``step_s`` is the time of a step on a device.
    """
    seconds = statistics.median(_run(replicas, sequences, steps) for _ in range(repeats))
    return ReplicaFigures(replicas, sequences, 1e6 * seconds, step_s / seconds)


def replicas_table(rows: Sequence[ReplicaFigures]) -> str:
    """Returns the table of all measurements."""
    header = ["replicas", "sequences each", "CPU us/step", "replicas of a thread"]
    return format_table(
        header, [[str(row.replicas), str(row.sequences), f"{row.us_per_step:.0f}", f"{row.drives:.0f}"] for row in rows]
    )


def _run(replicas: int, sequences: int, steps: int) -> float:
    """Returns the engine thread's processor time for a decode step, in seconds, measured on a new engine."""
    with tempfile.TemporaryDirectory(prefix="bench_engine_replicas_") as folder, ExitStack() as owned:
        core, executors = _engine(replicas, sequences, steps + 2 * WARM_UP_STEPS, Path(folder), owned)
        while any(executor.last_kind is not StepKind.DECODE for executor in executors):
            core.step()
        for _ in range(WARM_UP_STEPS * replicas):
            core.step()
        gc.collect()
        gc.disable()
        for executor in executors:
            executor.device_seconds = 0.0
        start = time.thread_time()
        for _ in range(steps * replicas):
            core.step()
        total = time.thread_time() - start - sum(executor.device_seconds for executor in executors)
        gc.enable()
        return total / (steps * replicas)


def _engine(
    replicas: int, sequences: int, max_tokens: int, folder: Path, owned: ExitStack
) -> tuple[EngineCore, list[InstantExecutor]]:
    """Returns an engine whose requests do not end during the measurement. ``owned`` closes the recorders."""
    limits, slots = limits_for(sequences, 2 * max_tokens)
    recorders = [
        record(Scheduler(limits), folder / str(index), RECORDING_BYTES, on_error=fail) for index in range(replicas)
    ]
    for recorder in recorders:
        owned.callback(recorder.close)
    router = Router([as_scheduler(recorder) for recorder in recorders])
    executors = [InstantExecutor(slots, Stopwatch(time.thread_time), 0) for _ in range(replicas)]
    tokenizer = load_tokenizer(load_config("llama_tiny_cpu.yaml"))
    core = EngineCore(
        router,
        list(zip(replica_sources(router), executors, strict=True)),
        lambda request: IncrementalDetokenizer.for_request(tokenizer, request.prompt_token_ids, request.sampling),
        EventLog(None),
        Metrics(process=False),
        lambda outputs: None,
        state_interval_s=1e9,
        poll=_InTurn(executors),
    )
    for _ in range(replicas):
        core.step()  # makes every replica ready before the first request, so that each gets its share
    for index in range(replicas * sequences):
        core.submit(Add(request_of(index, 2 * max_tokens)))
    return core, executors
