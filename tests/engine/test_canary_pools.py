"""Tests in which pools by prompt length the canary runs its prompt."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.errors import LLMServingError
from llm_serving.request import SchedulingParams
from llm_serving.routing.pools import PoolStatus
from llm_serving.self_checks.canary import PROMPT_TOKENS, Canary


def status(name: str, replicas: int, ready: int, limit: int | None = None) -> PoolStatus:
    return PoolStatus(name, limit, tuple(range(replicas)), ready, waiting=0, running=0, needing=0, placed=0)


def pools_of_runs(pools: list[PoolStatus], *, standby: object | None) -> list[str]:
    """Returns the pool that each run of the canary's prompt names."""
    found: list[str] = []

    def refuse(*given: object, scheduling: SchedulingParams, **named: object) -> None:
        found.append(scheduling.pool)
        raise LLMServingError("refused")

    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel=2), shape=SimpleNamespace(vocab_size=1000))
    engine: Any = SimpleNamespace(
        config=config, standby=standby, status=lambda: SimpleNamespace(pools=pools), open=refuse
    )
    metrics: Any = SimpleNamespace(self_check=lambda *given: None)
    asyncio.run(Canary(engine, SimpleNamespace(), metrics, 1.0).check())  # type: ignore[arg-type]
    return found


def test_without_pools_the_router_distributes_the_runs() -> None:
    assert pools_of_runs([], standby=None) == ["", ""]


def test_every_replica_of_every_pool_is_checked() -> None:
    pools = [status("short", 2, 1, PROMPT_TOKENS), status("long", 1, 0)]
    assert pools_of_runs(pools, standby=None) == ["short", "short", "long"]


@pytest.mark.parametrize("ready", [0, 1])
def test_a_run_starts_no_nodes_of_a_pool_that_was_given_back(ready: int) -> None:
    pools = [status("short", 1, ready, 100), status("long", 1, 1)]
    assert pools_of_runs(pools, standby=object()) == ["short"] * ready + ["long"]


def test_a_pool_for_prompts_below_the_length_of_the_canary_is_left_out() -> None:
    pools = [status("tiny", 1, 1, PROMPT_TOKENS - 1), status("long", 1, 1)]
    assert pools_of_runs(pools, standby=None) == ["long"]
