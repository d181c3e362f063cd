"""Tests the request field ``pool``: which pools a request may name."""

from __future__ import annotations

import pytest

from llm_serving.config import load_config
from llm_serving.engine.request_maker import RequestMaker
from llm_serving.errors import RequestError
from llm_serving.request import Request, SchedulingParams
from llm_serving.sampling_params import SamplingParams

POOLS = [
    "parallel_config.data_parallel=2",
    "parallel_config.pools=[{name: short, max_prompt_tokens: 8}, {name: long}]",
]


def made(pool: str, length: int, overrides: list[str]) -> Request:
    maker = RequestMaker(load_config("llama_tiny_cpu.yaml", overrides), lambda: 0.0, lambda: None)
    return maker.make("a", [3] * length, SamplingParams(max_tokens=1), None, SchedulingParams(pool=pool))


def test_a_request_names_a_pool() -> None:
    assert [made(pool, 8, POOLS).pool for pool in ("short", "long", "")] == ["short", "long", ""]


@pytest.mark.parametrize(
    ("pool", "length", "overrides", "message"),
    [
        ("medium", 8, POOLS, "the pool 'medium' is unknown; the pools are short, long"),
        ("long", 8, [], r"the pool 'long' is unknown; the model has no pools \(parallel_config.pools\)"),
        ("short", 9, POOLS, "the prompt has 9 tokens; the maximum of the pool 'short' is 8 tokens"),
    ],
)
def test_a_wrong_pool_is_refused(pool: str, length: int, overrides: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        made(pool, length, overrides)
    assert refused.value.param == "pool"
