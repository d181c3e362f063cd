"""Tests the cluster that connects agents on Ascends, in real processes. The CPU's communication replaces HCCL."""

from __future__ import annotations

import json
import select
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from llm_serving.errors import AgentLostError, AgentStartError
from llm_serving.executor import agent_group
from llm_serving.executor.hccl_cluster import ClusterPlace, GroupPart, HcclCluster, reserve_port
from support.json_program import run_program
from support.small_configs import small_config
from support.time_limits import time_limit

WORKER = Path(__file__).with_name("cluster_worker.py")


def add_up(places, tmp_path):
    """Starts a cluster at the address of the first place, and a worker at each place. Returns what the workers print.
    """
    cluster = HcclCluster(places[0], tmp_path / "cluster_0.log")
    try:
        environments = json.dumps([place.environment(member) for member, place in enumerate(places)])
        workers = run_program(WORKER, environments, folder=tmp_path, timeout=200, GLOG_v="3")
        assert workers.returncode == 0, workers.stderr
        return sorted(line.split() for line in workers.stdout.splitlines() if line.startswith("RESULT"))
    finally:
        cluster.close()
        assert not psutil.pid_exists(cluster.pid)


@pytest.mark.timeout(240)
def test_agents_find_each_other_and_have_the_ranks_they_were_given(tmp_path):
    """The scheduler listens on another address than that of the agents, as on another machine."""
    with reserve_port("127.0.0.2") as reserved:
        port = reserved.getsockname()[1]
    place = ClusterPlace("127.0.0.2", port, 2, 120.0, own_host="127.0.0.1")
    assert add_up([place, place], tmp_path) == [["RESULT", "0", "0", "2", "3"], ["RESULT", "1", "1", "2", "3"]]


def test_a_cluster_that_is_killed_while_it_waits(tmp_path):
    cluster = HcclCluster(ClusterPlace.on_this_machine("localhost", 2, 120.0), tmp_path / "cluster_0.log")
    assert psutil.pid_exists(cluster.pid)
    cluster.kill()
    assert select.select([cluster.exit_descriptor], [], [], time_limit(20))[0]
    assert isinstance(cluster.loss(is_ready=True), AgentLostError)
    loss = cluster.loss(is_ready=False)
    assert isinstance(loss, AgentStartError)
    assert f"the cluster scheduler ended (signal 9); its log is {tmp_path / 'cluster_0.log'}" in str(loss)
    cluster.close()
    assert not psutil.pid_exists(cluster.pid)


def test_each_agent_gets_its_environment():
    first, second = (ClusterPlace.on_this_machine("localhost", 4, 600.0) for _ in range(2))
    environment = first.environment(3)
    port = environment.pop("MS_SCHED_PORT")
    assert environment == {
        "MS_WORKER_NUM": "4",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_TOPO_TIMEOUT": "600",
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": "3",
    }
    assert 1024 <= int(port) <= 65535
    assert second.port != first.port


def ascend_pair(tmp_path):
    pair = small_config(tmp_path, ["parallel_config.tensor_parallel=2"])
    return replace(pair, model_config=replace(pair.model_config, device_target="Ascend"))


def test_only_groups_on_ascends_have_one(tmp_path):
    pair, ascend = small_config(tmp_path, ["parallel_config.tensor_parallel=2"]), ascend_pair(tmp_path)
    assert ClusterPlace.of(pair) is None
    alone = replace(ascend, parallel_config=replace(ascend.parallel_config, tensor_parallel=1))
    assert ClusterPlace.of(alone) is None
    place = ClusterPlace.of(ascend)
    assert place is not None
    assert (place.host, place.num_agents, place.own_host) == ("127.0.0.1", 2, "")


def test_agents_on_another_machine_connect_to_the_first_one(tmp_path, monkeypatch):
    for name in ("HCCL_IF_IP", "HCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    ascend, part = ascend_pair(tmp_path), GroupPart(range(1, 2), "10.0.0.6", ("10.0.0.5", 4711))
    place = ClusterPlace.of(ascend, part)
    assert place is not None
    wanted = {"MS_SCHED_HOST": "10.0.0.5", "MS_SCHED_PORT": "4711", "MS_NODE_ID": "1", "MS_WORKER_NUM": "2"}
    wanted |= {"MS_WORKER_IP": "10.0.0.6", "HCCL_IF_IP": "10.0.0.6"}
    assert wanted.items() <= place.environment(1).items()
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "eth7")
    assert "HCCL_IF_IP" not in place.environment(1), "the operator has chosen the network"
    with pytest.raises(AgentStartError, match="has no address at which its agents find each other"):
        ClusterPlace.of(ascend, replace(part, scheduler=None))


class Scheduler:
    """Stands for the scheduler process. It listens at its place, and has ended already."""

    def __init__(self, place, log_path):
        self.listener = socket.create_server((place.host, place.port))
        self.exit_descriptor = self.listener.fileno()

    def loss(self, *, is_ready):
        return AgentStartError(f"the scheduler ended, {is_ready=}")

    def kill(self):
        self.listener.close()

    close = kill


def test_a_group_starts_the_scheduler_at_the_port_it_kept_and_notices_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_group, "HcclCluster", Scheduler)
    reserved = reserve_port("127.0.0.1")
    address = reserved.getsockname()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    memory = SimpleNamespace(mark_down=lambda: None, close=lambda: None)
    part = GroupPart(range(0), "127.0.0.1", address, reserved)
    group = agent_group.AgentGroup(
        ascend_pair(tmp_path), 0, [], tmp_path, lambda *_: None, agent_group.AgentProgram(), memory=memory, part=part
    )
    [(_, take)] = group.sources()
    with pytest.raises(AgentStartError, match="the scheduler ended, is_ready=False"):
        take()
    group.close()
