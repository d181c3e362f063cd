"""Tests a server whose replicas are on nodes: real models, and nodes that are killed, drained and added under load."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.cluster import NodeProcess, new_key
from support.server_process import ServerProcess, running_server
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

PROMPTS = [f"Once upon a time there was a little fox. {number} and" for number in range(8)]


def body(prompt: str, max_tokens: int = 60) -> dict[str, object]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": 7, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


def ids_of(answer: Any) -> list[int]:
    assert "choices" in answer, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def wait_for(condition: Callable[[], Any], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + time_limit(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


@dataclass
class Cluster:
    """A server with two replicas, and its nodes."""

    folder: Path
    key: Path
    server: ServerProcess
    nodes: list[NodeProcess] = field(default_factory=list)

    def new_node(self) -> NodeProcess:
        node = NodeProcess(self.folder / f"node{len(self.nodes)}", self.key)
        self.nodes.append(node)
        return node

    def states(self) -> dict[str, str]:
        return {node["name"]: node["state"] for node in self.server.get("/v1/cluster")["nodes"]}

    def num_used(self) -> int:
        return list(self.states().values()).count("used")

    def are_two_ready(self) -> bool:
        return [each["state"] for each in self.server.get("/v1/cluster")["replicas"]] == ["ready", "ready"]

    def answers_during(self, disturb: Callable[[], None]) -> list[list[int]]:
        """Asks for all prompts, and calls ``disturb`` when requests run. Returns the tokens of the answers."""
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = [pool.submit(self.server.post, "/v1/completions", body(prompt, 400)) for prompt in PROMPTS]
            wait_for(lambda: all(each["running"] for each in self.server.get("/v1/cluster")["replicas"]))
            disturb()
            return [ids_of(each.result()) for each in asked]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm_serving", "cluster", *words, "--url", self.server.url]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=time_limit(60))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, shallow_model: Path) -> Iterator[Cluster]:
    """Provides a server with two nodes. The tests of this file share the server and run in order."""
    folder = tmp_path_factory.mktemp("cluster")
    key = new_key(folder)
    nodes = [NodeProcess(folder / f"node{number}", key) for number in range(2)]
    settings = [
        f"model_config.model_path={shallow_model}",
        *("parallel_config.executor=nodes", "parallel_config.data_parallel=2"),
        f"parallel_config.cluster_key_file={key}",
        *(f"parallel_config.nodes={json.dumps([node.address for node in nodes])}", "model_config.cpu_threads=1"),
    ]
    made: list[Cluster] = []
    try:
        with running_server(folder / "server", settings) as server:
            made.append(Cluster(folder, key, server, nodes))
            wait_for(made[0].are_two_ready)
            yield made[0]
            assert psutil.Process(server.pid).children(recursive=True) == [], "the server has no agents itself"
    finally:
        for node in nodes:
            node.stop()


@pytest.fixture(scope="module")
def expected(shallow_server: ServerProcess) -> dict[int, list[list[int]]]:
    """Returns the output tokens of each prompt with a local agent, by ``max_tokens``."""
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:

        def ask(length: int) -> list[list[int]]:
            answers = pool.map(lambda prompt: shallow_server.post("/v1/completions", body(prompt, length)), PROMPTS)
            return [ids_of(answer) for answer in answers]

        return {length: ask(length) for length in (60, 400)}


def test_texts_are_those_of_local_agents(
    cluster: Cluster, shallow_server: ServerProcess, expected: dict[int, list[list[int]]]
) -> None:
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: cluster.server.post("/v1/completions", body(prompt)), PROMPTS))
    assert [ids_of(answer) for answer in answers] == expected[60]
    assert {event["replica"] for event in cluster.server.events("request_end")} == {0, 1}
    # Masks, a logit bias and log-probabilities are sent to the node separately from the other inputs and results.
    wanted = {"structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 2, "logit_bias": {"5": 1.0}}
    answers = [
        each.post("/v1/completions", {"prompt": "yes or no?", "max_tokens": 8, "seed": 3, **wanted})
        for each in (cluster.server, shallow_server)
    ]
    assert answers[0]["choices"][0]["text"] in ("yes", "no"), answers[0]
    assert answers[0]["choices"] == answers[1]["choices"]
    shown = cluster.command("status")
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[1] for line in shown.stdout.splitlines()] == ["used", "used"]


def test_a_killed_node_costs_no_request(cluster: Cluster, expected: dict[int, list[list[int]]]) -> None:
    killed = cluster.nodes[0]
    assert cluster.answers_during(lambda: killed.send_signal(signal.SIGKILL)) == expected[400]
    assert len(cluster.server.events("agent_lost")) == 1
    wait_for(lambda: cluster.states()[killed.address] == "down")
    added = cluster.new_node()
    assert cluster.command("add", added.address).returncode == 0
    wait_for(cluster.are_two_ready)
    assert cluster.states()[added.address] == "used"


def test_a_drained_node_costs_no_request(cluster: Cluster, expected: dict[int, list[list[int]]]) -> None:
    drained, added = cluster.nodes[1], cluster.new_node()

    def exchange() -> None:
        assert cluster.command("drain", drained.address).returncode == 0
        assert cluster.command("add", added.address).returncode == 0

    assert cluster.answers_during(exchange) == expected[400]
    wait_for(cluster.are_two_ready)
    assert cluster.states()[drained.address] == "drained"
    assert cluster.states()[added.address] == "used"
    assert len(cluster.server.events("agent_lost")) == 1, "a drain loses no agent"
    assert len(cluster.server.events("agent_released")) == 1
    refused = cluster.command("drain", "nowhere:1")
    assert refused.returncode == 1
    assert "There is no node 'nowhere:1'" in refused.stderr
