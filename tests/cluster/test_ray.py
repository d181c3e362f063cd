"""Tests nodes that Ray places: several Ray nodes on this machine, agents without a model."""

from __future__ import annotations

import importlib.util
import signal
import sys

import pytest

from llm_serving.cluster.nodes import NodeState
from llm_serving.cluster.ray_nodes import RayNodes, check_ray, placement_of
from llm_serving.errors import ConfigError
from llm_serving.executor.base import AgentLost, AgentReady
from support.executor_steps import events_until, prefill, results
from support.ray_cluster import RayNode
from support.small_configs import small_config
from support.stub_agent import HANG, stub_token

HAS_RAY = importlib.util.find_spec("ray") is not None


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package ray is missing; pip install llm-serving\[ray\]"):
        check_ray()


def test_a_replica_reserves_cpus_and_npus(tmp_path):
    config = small_config(
        tmp_path,
        ["parallel_config.executor=ray", "parallel_config.cluster_key_file=key", "parallel_config.ray_cpus=8"],
    )
    placement = placement_of(config)
    assert (placement.num_nodes, placement.resources) == (1, {"CPU": 8.0})


@pytest.fixture(scope="module")
def ray_nodes(tmp_path_factory):
    """Provides a Ray cluster: a head without CPUs, and three nodes with one CPU each. A replica needs one CPU."""
    folder = tmp_path_factory.mktemp("ray")
    head = RayNode(folder, "head", "--head", "--port=0", "--num-cpus=0", "--include-dashboard=false")
    nodes = [head]
    try:
        for number in range(3):
            nodes.append(RayNode(folder, f"node{number}", f"--address={head.address()}", "--num-cpus=1"))
        yield nodes
    finally:
        for node in reversed(nodes):
            node.stop()


def wait_until_used(executors, pool, count=2):
    """Polls the executors until this number of nodes is in use and ready."""
    while True:
        used = [each for each in pool.status() if each["state"] == NodeState.USED.value]
        states = [executor.agents()[0]["state"] for executor in executors]
        if len(used) == count and states == ["ready"] * len(executors):
            return {str(each["name"]) for each in used}
        for executor in executors:
            executor.poll(0.1)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_RAY, reason="the package ray is not installed")
def test_ray_places_nodes_and_replaces_lost_ones(ray_nodes, make_executor, pool, key, tmp_path):
    """Kills agent_host, then stops it, then kills a raylet. Each time, Ray places another node."""
    settings = (
        "parallel_config.executor=ray", "parallel_config.data_parallel=2",
        f"parallel_config.cluster_key_file={key}", f"parallel_config.ray_address={ray_nodes[0].address()}",
    )  # fmt: skip
    placement = placement_of(small_config(tmp_path, settings), "support.stub_agent")
    driver = RayNodes(placement, pool, tmp_path / "ray_driver.log")
    try:
        executors = [make_executor(*settings, replica=number) for number in range(2)]
        names = wait_until_used(executors, pool)
        assert len(names) == 2
        for seq, fault in enumerate((signal.SIGKILL, signal.SIGSTOP, "raylet")):
            node = next(each for each in ray_nodes[1:] if each.process.poll() is None and each.hosts())
            pids = {str(each["pid"]): str(each["name"]) for each in pool.status()}
            [host] = node.hosts()
            lost = pids[str(host.pid)]
            [executor] = [each for each in executors if each._group._node.name == lost]
            executor.submit(prefill(seq, HANG))
            if fault == "raylet":
                node.raylet().kill()
            else:
                host.send_signal(fault)
            [*_, event] = events_until(executor, AgentLost, timeout_s=60.0)
            assert lost in event.error
            events_until(executor, AgentReady, timeout_s=120.0)
            assert lost not in wait_until_used(executors, pool)
            executor.submit(prefill(seq + 100, 5))
            assert results(executor, 1)[0].sampled_ids == [stub_token(1, 0)]
        assert "ray" not in sys.modules, "the server's code never imports ray"
    finally:
        driver.close()
    assert [host for node in ray_nodes for host in node.hosts()] == []
