"""Recorded runs of the scheduler, for tests of the flight recorder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from llm_serving.flight.recorder import FlightRecorder, as_scheduler
from llm_serving.flight.setup import record
from llm_serving.request import Request
from support.fakes import make_limits, make_request
from support.simulation import Simulation, random_run

RING_BYTES = 1 << 22
SMALL_RING_BYTES = 1 << 18
"""Size of a ring of eight segments with some hundred steps each. A segment can hold the state of 30 requests."""


def recorded_simulation(folder: Path, ring_bytes: int = RING_BYTES, **limits: Any) -> tuple[Simulation, FlightRecorder]:
    """Returns a simulation whose scheduler is recorded. An error of the recorder fails the test."""
    simulation = Simulation(make_limits(**limits))
    recorder = record(simulation.scheduler, folder, ring_bytes, on_error=fail)
    simulation.scheduler = as_scheduler(recorder)
    return simulation, recorder


def some_requests(rng: random.Random, count: int) -> list[Request]:
    """Returns random requests, many of which have common prefixes."""
    beginnings = [[rng.randrange(2, 50) for _ in range(40)] for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = rng.choice(beginnings)[: rng.randint(1, 40)]
        if rng.random() < 0.5:
            prompt = [*prompt[:-1], rng.randrange(2, 50)]
        request = make_request(f"r{number}", prompt, rng.randint(1, 20), ignore_eos=rng.random() < 0.5)
        request.priority, request.tenant = rng.choice((0, 0, 1)), rng.choice("ab")
        request.cache_salt = rng.choice((b"", b"", b"another"))
        requests.append(request)
    return requests


def record_random_run(
    folder: Path, seed: int, *, count: int = 80, ring_bytes: int = RING_BYTES, drafts: bool = False, **limits: Any
) -> FlightRecorder:
    """Records a random run, in which some requests are aborted, until every request has ended.

    With ``drafts``, random drafts are offered before each step.
    """
    rng = random.Random(seed)
    simulation, recorder = recorded_simulation(folder, ring_bytes, **limits)
    simulation.drafts = random.Random(seed) if drafts else None
    random_run(simulation, some_requests(rng, count), rng, aborts=0.02)
    recorder.close()
    return recorder


def record_waves(folder: Path, seed: int, *, waves: int = 4, **limits: Any) -> FlightRecorder:
    """Records several random runs, one after the other, into a ring of small segments."""
    rng = random.Random(seed)
    simulation, recorder = recorded_simulation(folder, SMALL_RING_BYTES, **limits)
    for wave in range(waves):
        requests = some_requests(rng, 30)
        for request in requests:
            request.request_id = f"{wave}.{request.request_id}"
        random_run(simulation, requests, rng, aborts=0.02)
    recorder.close()
    return recorder


def fail(message: str) -> None:
    raise AssertionError(message)
