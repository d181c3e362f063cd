"""Records a run in which one request is computed in chunks and preempted, for tests of the request's timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_serving.request import Request
from llm_serving.scheduler.limits import Policy
from support.fakes import make_request
from support.recorded_runs import recorded_simulation

STEP_S = 0.01
MAX_TOKENS = 20


def record_requests(folder: Path, name: str, *, others: int = 5, **limits: Any) -> Request:
    """Records a run of the request ``name`` after ``others`` older ones. A step takes 10 ms. Returns the request.

    A step has at most 16 tokens. The cache has 33 blocks of 4 tokens, so the last of six requests is preempted.
    """
    simulation, recorder = recorded_simulation(folder, policy=Policy.CHUNKED, max_num_batched_tokens=16, **limits)
    simulation.add(*(make_request(f"other{index}", 6, MAX_TOKENS) for index in range(others)))
    request = make_request(name, 30, MAX_TOKENS)
    simulation.add(request)
    while not simulation.scheduler.is_idle:
        simulation.schedule()
        simulation.now += STEP_S
        simulation.answer()
    recorder.close()
    return request
