"""Tests in which pools by prompt length the canary runs its prompt."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from llm_serving.errors import LLMServingError
from llm_serving.request import SchedulingParams
from llm_serving.routing.pools import PoolStatus
from llm_serving.self_checks.canary import PROMPT_TOKENS, Canary


def status(name: str, replicas: int, ready: int, limit: int | None = None) -> PoolStatus:
    return PoolStatus(name, limit, tuple(range(replicas)), ready, waiting=0, running=0, needing=0, placed=0)


def pools_of_runs(pools: list[PoolStatus]) -> list[str]:
    """Returns the pool that each run of the canary's prompt names."""
    found: list[str] = []

    def refuse(*given: object, scheduling: SchedulingParams, **named: object) -> None:
        found.append(scheduling.pool)
        raise LLMServingError("refused")

    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel=2), shape=SimpleNamespace(vocab_size=1000))
    engine: Any = SimpleNamespace(config=config, status=lambda: SimpleNamespace(pools=pools, agents=[]), open=refuse)
    metrics: Any = SimpleNamespace(self_check=lambda *given: None)
    asyncio.run(Canary(engine, SimpleNamespace(), metrics, 1.0).check())  # type: ignore[arg-type]
    return found


def test_without_pools_the_router_distributes_the_runs() -> None:
    assert pools_of_runs([]) == ["", ""]


def test_every_ready_replica_of_every_pool_is_checked() -> None:
    assert pools_of_runs([status("short", 2, 2, PROMPT_TOKENS), status("long", 2, 1)]) == ["short", "short", "long"]


def test_a_run_starts_no_nodes_of_a_pool_that_has_none() -> None:
    assert pools_of_runs([status("short", 1, 0, 100), status("long", 1, 1)]) == ["long"]


def test_a_pool_for_prompts_below_the_length_of_the_canary_is_left_out() -> None:
    pools = [status("tiny", 1, 1, PROMPT_TOKENS - 1), status("long", 1, 1)]
    assert pools_of_runs(pools) == ["long"]
