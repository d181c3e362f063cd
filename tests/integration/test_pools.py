"""Tests two replicas in two pools by prompt length. Texts equal those of one replica, also without a pool."""

from __future__ import annotations

import concurrent.futures
import time
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

STORY = "Once upon a time there was a little fox. "
PROMPTS = [f"{STORY * (1 if number % 3 else 12)}{number} and" for number in range(9)]
"""Two thirds of the prompts are short."""
LIMIT = 100
POOLS = [
    "parallel_config.data_parallel=2",
    f"parallel_config.pools=[{{name: short, max_prompt_tokens: {LIMIT}}}, {{name: long}}]",
]


def ask_all(server: ServerProcess, max_tokens: int) -> list[list[int]]:
    def ask(prompt: str) -> list[int]:
        more = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "return_token_ids": True}
        answer: Any = server.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})
        assert "choices" in answer, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(ask, PROMPTS))


@pytest.fixture(scope="module")
def expected(shallow_server: ServerProcess) -> dict[int, list[list[int]]]:
    return {length: ask_all(shallow_server, length) for length in (20, 200)}


def test_prompts_go_to_their_pool_and_a_lost_pool_loses_nothing(
    tmp_path: Path, shallow_model: Path, expected: dict[int, list[list[int]]]
) -> None:
    with running_server(tmp_path, [*POOLS, f"model_config.model_path={shallow_model}"]) as server:
        assert ask_all(server, 20) == expected[20]
        ends = server.events("request_end")
        assert {(event["prompt_tokens"] > LIMIT, event["replica"]) for event in ends} == {(True, 0), (False, 1)}
        pools = server.wait_until_idle()["pools"]
        short = {"name": "short", "max_prompt_tokens": LIMIT, "replicas": [1], "ready": 1, "waiting": 0, "placed": 6}
        long = {"name": "long", "max_prompt_tokens": None, "replicas": [0], "ready": 1, "waiting": 0, "placed": 3}
        assert pools == [short, long]
        metrics = server.get_text("/metrics")
        assert 'llm_serving_pool_requests_placed_total{pool="short"} 6.0' in metrics
        assert 'llm_serving_pool_replicas_ready{pool="long"} 1.0' in metrics

        unknown = server.post("/v1/completions", {"prompt": "a", "pool": "medium"})
        assert (unknown["status"], unknown["error"]["param"]) == (400, "pool")
        assert unknown["error"]["message"] == "the pool 'medium' is unknown; the pools are short, long"

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            asked = thread.submit(ask_all, server, 200)
            deadline = time.monotonic() + time_limit(30.0)
            while server.get("/server_info")["engine"]["running"] < len(PROMPTS) - 1:
                assert time.monotonic() < deadline, "the requests never ran"
                time.sleep(0.02)
            [agent] = [one for one in server.get("/server_info")["engine"]["agents"] if one["replica"] == 1]
            next(one for one in server.agents() if one.pid == agent["pid"]).kill()
            assert asked.result() == expected[200]
        later = [event for event in server.events("request_end")[len(ends) :] if event["finish_reason"] == "length"]
        assert len(later) == len(PROMPTS)
        moved = [event for event in later if event["prompt_tokens"] <= LIMIT and event["replica"] == 0]
        assert moved, "short prompts continued in the pool for long ones, as far as it had batch rows"
        assert {event["replica"] for event in later if event["prompt_tokens"] > LIMIT} == {0}
