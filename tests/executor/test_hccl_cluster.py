"""Tests the cluster that connects agents on Ascends, in real processes. The CPU's communication replaces HCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from llm_serving.executor.hccl_cluster import HcclCluster
from support.small_configs import small_config
from support.time_limits import time_limit

WORKER = Path(__file__).with_name("cluster_worker.py")


@pytest.mark.timeout(240)
def test_agents_find_each_other_and_have_the_ranks_they_were_given(tmp_path):
    cluster = HcclCluster("localhost", 2, 120.0, tmp_path / "cluster_0.log")
    workers = []
    try:
        for member in (1, 0):  # the first process that connects does not have rank 0
            environment = {**os.environ, **cluster.environment(member), "GLOG_v": "3"}
            workers.append(subprocess.Popen([sys.executable, str(WORKER)], env=environment, stdout=subprocess.PIPE))
        outputs = [worker.communicate(timeout=time_limit(200))[0].decode().split() for worker in workers]
        assert outputs == [["RESULT", "1", "2", "3"], ["RESULT", "0", "2", "3"]]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        cluster.close()
    assert not psutil.pid_exists(cluster.pid)


def test_a_cluster_that_is_killed_while_it_waits(tmp_path):
    cluster = HcclCluster("127.0.0.1", 2, 120.0, tmp_path / "cluster_0.log")
    assert psutil.pid_exists(cluster.pid)
    cluster.kill()
    cluster.close()
    assert not psutil.pid_exists(cluster.pid)


def test_each_agent_gets_its_environment(tmp_path):
    first, second = (HcclCluster("127.0.0.1", 4, 600.0, tmp_path / f"cluster_{n}.log") for n in (0, 1))
    try:
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
        assert second.environment(0)["MS_SCHED_PORT"] != port
    finally:
        first.close()
        second.close()


def test_only_groups_on_ascends_have_one(tmp_path):
    pair = small_config(tmp_path, ["parallel_config.tensor_parallel=2"])
    assert HcclCluster.of(pair, tmp_path / "log") is None
    alone = small_config(tmp_path)
    ascend = replace(alone, model_config=replace(alone.model_config, device_target="Ascend"))
    assert HcclCluster.of(ascend, tmp_path / "log") is None
    cluster = HcclCluster.of(replace(pair, model_config=ascend.model_config), tmp_path / "cluster_0.log")
    assert cluster is not None
    cluster.close()
