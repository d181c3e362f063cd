"""Tests a server whose model is divided among two nodes: the tokens are the oracle's, also after a node is killed."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cluster import NodeProcess, new_key
from support.golden_files import golden_of
from support.oracle_ties import complete
from support.server_process import running_server
from support.small_configs import TINY_LLAMA
from support.sweeps import with_sweeps
from support.time_limits import time_limit

CASES = golden_of("tiny_llama")["cases"]


def states(server):
    return {node["name"]: node["state"] for node in server.get("/v1/cluster")["nodes"]}


def wait_for(condition):
    deadline = time.monotonic() + time_limit(60)
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


ROLES = (
    *("parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]"),
    "parallel_config.prefill_threshold=4",
)


DRAFTS = (
    *("speculative_config.method=draft", f"speculative_config.model={TINY_LLAMA}"),
    *("speculative_config.always=true", "speculative_config.max_draft_tokens=4"),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("roles", "drafts"),
    with_sweeps([(ROLES, ()), ((), DRAFTS), (ROLES, DRAFTS)], lambda roles, drafts: bool(drafts)),
)
def test_the_tokens_are_the_oracles_also_after_a_node_is_killed(tmp_path, roles, drafts):
    """With roles, the blocks of a prompt travel from the two nodes of one replica to the two nodes of the other one.

    The first node of a replica makes the drafts.
    """
    key, num_used = new_key(tmp_path), 4 if roles else 2
    nodes = [NodeProcess(tmp_path / f"node{number}", key) for number in range(num_used + 1)]
    addresses = [node.address for node in nodes]
    settings = [
        *(f"model_config.model_path={TINY_LLAMA}", "model_config.model_dtype=float32", "model_config.cpu_threads=1"),
        *("parallel_config.tensor_parallel=2", "parallel_config.nodes_per_replica=2"),
        *("parallel_config.executor=nodes", f"parallel_config.cluster_key_file={key}"),
        f"parallel_config.nodes={json.dumps(addresses)}",
        *roles,
        *drafts,
    ]
    try:
        with running_server(tmp_path / "server", settings) as server:
            wait_for(lambda: sorted(states(server).values()) == ["free", *["used"] * num_used])
            wait_for(lambda: all(each["state"] == "ready" for each in server.get("/v1/cluster")["replicas"]))
            for case in CASES:
                assert complete(server, case["prompt"], 64) == case["tokens"]
            if roles:
                assert server.wait_until_idle()["hand_overs"]["completed"] > 0
            assert (server.counter("accepted_draft_tokens") > 0.5 * 64 * len(CASES)) == bool(drafts)
            before = states(server)
            killed = next(node for node in nodes if before[node.address] == "used")
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(complete, server, case["prompt"], 64) for case in CASES for _ in range(2)]
                wait_for(lambda: any(each["running"] for each in server.get("/v1/cluster")["replicas"]))
                killed.send_signal(signal.SIGKILL)
                answers = [each.result(time_limit(200)) for each in asked]
            assert answers == [case["tokens"] for case in CASES for _ in range(2)]
            wait_for(lambda: server.events("agent_lost"))
            others = [node.address for node in nodes if node is not killed]
            wait_for(lambda: [states(server)[address] for address in others] == ["used"] * num_used)
    finally:
        for node in nodes:
            node.stop()
