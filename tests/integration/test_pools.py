"""Tests two replicas in two pools by prompt length, also on nodes that name a pool and come only for its requests.

Texts equal those of one replica, also without a pool.
"""

from __future__ import annotations

import concurrent.futures
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.cluster import NodeProcess, new_key
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


def ask_one(server: ServerProcess, prompt: str, max_tokens: int) -> list[int]:
    more = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    answer: Any = server.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})
    assert "choices" in answer, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def ask_all(server: ServerProcess, max_tokens: int) -> list[list[int]]:
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: ask_one(server, prompt, max_tokens), PROMPTS))


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
        none = {"waiting": 0, "running": 0, "needing": 0}
        short = {"name": "short", "max_prompt_tokens": LIMIT, "replicas": [1], "ready": 1, "placed": 6, **none}
        long = {"name": "long", "max_prompt_tokens": None, "replicas": [0], "ready": 1, "placed": 3, **none}
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
    # A stopped server has written all events. The last one of a request may follow its response.
    later = [event for event in server.events("request_end") if event["output_tokens"] == 200]
    assert len(later) == len(PROMPTS)
    moved = [event for event in later if event["prompt_tokens"] <= LIMIT and event["replica"] == 0]
    assert moved, "short prompts continued in the pool for long ones, as far as it had batch rows"
    assert {event["replica"] for event in later if event["prompt_tokens"] > LIMIT} == {0}


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + time_limit(40)
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.1)


def test_nodes_serve_the_pool_that_they_name_and_each_pool_goes_down_to_no_node(
    tmp_path: Path, shallow_model: Path, expected: dict[int, list[list[int]]]
) -> None:
    """The test does what an autoscaler does: it starts a node of a pool when requests need the pool."""
    key, ports = new_key(tmp_path), free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    settings = [
        *POOLS,
        f"model_config.model_path={shallow_model}",
        *("parallel_config.executor=nodes", "parallel_config.idle_s=2", f"parallel_config.cluster_key_file={key}"),
        *(f"parallel_config.nodes=[{', '.join(map(repr, addresses))}]", "model_config.cpu_threads=1"),
    ]
    nodes: dict[str, NodeProcess] = {}

    def new_node(pool: str, listen: str = "127.0.0.1:0") -> None:
        nodes[pool] = NodeProcess(tmp_path / pool, key, "--pool", pool, listen=listen)

    with running_server(tmp_path / "server", settings) as server:

        def shown() -> list[tuple[str, int | None]]:
            return [(node["state"], node["replica"]) for node in server.get("/v1/cluster")["nodes"]]

        def needing() -> list[int]:
            return [pool["needing"] for pool in server.get("/server_info")["engine"]["pools"]]

        try:
            with concurrent.futures.ThreadPoolExecutor(2) as threads:
                short = threads.submit(ask_one, server, PROMPTS[1], 20)
                wait_for(lambda: needing() == [1, 0])
                metrics = server.get_text("/metrics")
                assert 'llm_serving_pool_requests{pool="short"} 1.0' in metrics
                assert 'llm_serving_pool_requests{pool="long"} 0.0' in metrics
                new_node("long", addresses[0])
                wait_for(lambda: shown()[0] == ("free", None))
                assert not short.done(), "the node names another pool"
                new_node("short", addresses[1])
                assert short.result() == expected[20][1]
                assert shown()[0] == ("free", None), "no request needs the pool long"
                long = threads.submit(ask_one, server, PROMPTS[0], 200)
                wait_for(lambda: shown()[0] == ("used", 0))
                assert long.result() == expected[200][0]
            wait_for(lambda: len(server.events("request_end")) == 2)  # the log is written after the responses
            ends = [(event["prompt_tokens"] > LIMIT, event["replica"]) for event in server.events("request_end")]
            assert ends == [(False, 1), (True, 0)]
            wait_for(lambda: shown() == [("free", None)] * 2 and not any(node.agents() for node in nodes.values()))
            assert len(server.events("agent_released")) == 2
            assert server.events("agent_lost") == []

            new_node("medium")
            server.post("/v1/cluster/add", {"address": nodes["medium"].address})
            wait_for(lambda: shown()[-1][0] == "refused")
            reason = server.get("/v1/cluster")["nodes"][-1]["reason"]
            assert reason == "the node serves the pool 'medium', which is unknown; the pools are short, long"
        finally:
            for node in nodes.values():
                node.stop()
