"""Tests that mixed requests give the same bits with a cache that is far too small as with a large cache.

The requests have the same tokens and log-probabilities. The tests cover every way in which the scheduler frees blocks.
``make test`` compares 200 requests, and ``make test-sweeps`` 500 requests.
"""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

import pytest

from support.completions_client import assert_same, run_together
from support.request_mixes import mixed_body
from support.server_process import running_server
from support.sweeps import with_sweeps

NUM_REQUESTS = 500
TESTED_REQUESTS = 200
"""Number of requests that ``make test`` compares: the first ones of ``NUM_REQUESTS``."""
VOCAB = 1900
BLOCK = 16

TIGHT = ["model_config.max_generate_length=192", "model_config.decode_batch_size=[24]", "pa_config.num_blocks=15"]
CACHE = "scheduler_config.prefix_cache=true"
NO_CACHE = "scheduler_config.prefix_cache=false"
CHUNKED = ["scheduler_config.policy=chunked", "scheduler_config.chunk_tokens=40"]

WAYS = {
    "recompute": [NO_CACHE],
    "recompute, chunked, cached": ["scheduler_config.preemption=recompute", *CHUNKED, CACHE],
    "swap": ["scheduler_config.preemption=swap", "pa_config.num_host_blocks=256", NO_CACHE],
    "swap, chunked, cached": ["scheduler_config.preemption=swap", "pa_config.num_host_blocks=256", *CHUNKED, CACHE],
    "swap to a small host, decode_first, cached, 3 ahead": [
        "scheduler_config.preemption=swap",
        "pa_config.num_host_blocks=12",
        "scheduler_config.policy=decode_first",
        "scheduler_config.decode_steps_ahead=3",
        CACHE,
    ],
    "auto, slo, cached": ["scheduler_config.preemption=auto", "scheduler_config.policy=slo", CACHE],
}
TESTED = ("recompute, chunked, cached", "swap to a small host, decode_first, cached, 3 ahead")
"""The cases of ``make test``."""


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Returns random bodies for /v1/completions.

    Prompts have common beginnings, lengths are close to multiples of the block size, and all kinds of sampling occur.
    """
    draw = random.Random(seed)
    families = [[draw.randrange(300, VOCAB) for _ in range(3 * BLOCK)] for _ in range(6)]
    return [make_request(draw, index, draw.choice(families)) for index in range(NUM_REQUESTS)]


def make_request(draw: random.Random, index: int, family: list[int]) -> dict[str, Any]:
    shared = draw.choice([0, BLOCK - 1, BLOCK, BLOCK + 1, 40, 3 * BLOCK])
    own = draw.choice([0, 1, 1, 2, 7, BLOCK]) if shared else draw.choice([1, BLOCK, 30, 70])
    prompt = family[:shared] + [draw.randrange(300, VOCAB) for _ in range(own)]
    return mixed_body(draw, index, prompt, [1, BLOCK, 40, 80])


@pytest.fixture(scope="module")
def unpressed(shallow_server):
    """Returns a function that gives the results of requests on a server with a large cache.

    The server has no preemption and no prefix cache. It computes every prompt in one step.
    """

    @functools.cache
    def results(count):
        answers = asyncio.run(run_together(shallow_server.url, make_requests(seed=4)[:count], seed=1, leave=0.0))
        engine = shallow_server.wait_until_idle()
        assert (engine["preemptions"], engine["prefix_hit_tokens"]) == (0, 0)
        return answers

    return results


@pytest.mark.parametrize(
    ("way", "count"),
    with_sweeps(
        [(way, TESTED_REQUESTS) for way in TESTED] + [(way, NUM_REQUESTS) for way in WAYS],
        lambda way, count: count == NUM_REQUESTS,
    ),
)
def test_answers_are_the_same_to_the_bit_under_pressure(way, count, unpressed, shallow_model, tmp_path):
    bodies = make_requests(seed=4)[:count]
    with running_server(tmp_path, [f"model_config.model_path={shallow_model}", *TIGHT, *WAYS[way]]) as server:
        answers = asyncio.run(run_together(server.url, bodies, seed=2))
        engine = server.wait_until_idle()
        ends = server.events("request_end")
    compared = 0
    for body, expected, answer in zip(bodies, unpressed(count), answers, strict=True):
        if answer is not None:
            assert_same(answer, expected, body)
            compared += 1
    assert compared >= 0.8 * count
    check_pressed(way, engine, ends, count / NUM_REQUESTS)


def check_pressed(way: str, engine: dict[str, Any], ends: list[dict[str, Any]], scale: float) -> None:
    """Checks that preemptions occurred often. ``scale`` is the fraction of ``NUM_REQUESTS`` that was sent.

    ``way`` is the name of the setup, for example "swap, chunked, cached". These effects must have occurred often, too.
    With "recompute", no sequence may have been swapped.
    """
    assert engine["preemptions"] >= 20 * scale
    if "swap" in way:
        assert engine["swaps"] >= 10 * scale
    if "recompute" in way:
        assert engine["swaps"] == 0
    if "cached" in way:
        assert engine["prefix_hit_tokens"] >= 50 * scale * BLOCK
    if "chunked" in way:
        assert sum(end["prefill_chunks"] > 1 + end["preemptions"] for end in ends) >= 50 * scale
