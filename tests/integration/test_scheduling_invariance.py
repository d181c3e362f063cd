"""Tests that text never depends on scheduling: concurrent mixed requests give the same bits as each request alone.

``make test`` compares 80 requests, and ``make test-sweeps`` 200 requests.
"""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

import pytest

from support.completions_client import assert_same, count_changed, run_alone, run_together
from support.request_mixes import mixed_body
from support.server_process import running_server
from support.sweeps import with_sweeps

NUM_REQUESTS = 200
TESTED_REQUESTS = 80
"""Number of requests that ``make test`` compares: the first ones of ``NUM_REQUESTS``."""
VOCAB = 1900
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "What is 2 + 3?",
    "A fox and a river",
    "The sea is",
    "My name is Tiny and",
]

# The pool of KV blocks is so small that blocks run out and sequences are preempted. The scheduler reserves one block
# for each running sequence. The longest outputs need four or five blocks in addition to their prompt.
PRESSED = ["model_config.max_generate_length=256", "pa_config.num_blocks=18", "model_config.decode_batch_size=[24]"]


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Returns random bodies for /v1/completions: greedy and sampled, with and without penalties, short and long."""
    draw = random.Random(seed)
    return [make_request(draw, index) for index in range(NUM_REQUESTS)]


def make_request(draw: random.Random, index: int) -> dict[str, Any]:
    if draw.random() < 0.5:
        prompt: object = draw.choice(PROMPTS)
    else:
        prompt = [draw.randrange(300, VOCAB) for _ in range(draw.choice([1, 2, 15, 16, 17, 40, 120]))]
    return mixed_body(draw, index, prompt, [1, 2, 16, 33, 48, 70])


@pytest.fixture(scope="module")
def alone(shallow_server):
    """Returns a function that gives the results of requests that run alone, with enough blocks and without a prefix
    cache.
    """

    @functools.cache
    def results(count):
        return asyncio.run(run_alone(shallow_server.url, make_requests(seed=7)[:count]))

    return results


@pytest.mark.parametrize(
    ("ahead", "policy", "count"),
    with_sweeps(
        [
            (ahead, policy, count)
            for count in (TESTED_REQUESTS, NUM_REQUESTS)
            for ahead, policy in ((0, "fcfs"), (2, "prefill_first"), (0, "prefill_first"), (2, "fcfs"))
        ],
        lambda ahead, policy, count: (ahead == 0) != (policy == "fcfs") or count == NUM_REQUESTS,
    ),
)
def test_concurrent_answers_equal_lone_ones(policy, ahead, count, alone, shallow_model, tmp_path, record_property):
    bodies = make_requests(seed=7)[:count]
    overrides = [*PRESSED, f"model_config.model_path={shallow_model}"]
    overrides += [f"scheduler_config.policy={policy}", f"scheduler_config.decode_steps_ahead={ahead}"]
    with running_server(tmp_path, overrides) as server:
        together = asyncio.run(run_together(server.url, bodies, seed=ahead))
        engine = server.wait_until_idle()
    changed, compared = count_changed(together, alone(count), bodies)
    record_property("changed_answers", f"{changed} of {compared}")
    for body, expected, answer in zip(bodies, alone(count), together, strict=True):
        if answer is not None:
            assert_same(answer, expected, body)
    assert compared >= 0.75 * count
    assert engine["preemptions"] > 0, "the pool was meant to be too small"
    assert engine["prefix_hit_tokens"] > 0, "the prefix cache was meant to share blocks, which is the default"
