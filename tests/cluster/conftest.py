"""Provides nodes with stub agents, and executors that use them. Nothing may be left after a test."""

from __future__ import annotations

import pytest

from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.nodes import NodePool
from llm_serving.cluster.program import model_files
from llm_serving.cluster.remote_starter import RemoteStarter
from llm_serving.executor.agent_executor import AgentExecutor
from support.cluster import NodeProcess, new_key
from support.executor_steps import shm_entries
from support.small_configs import small_config

STUB = ("--agent-module", "support.stub_agent")


@pytest.fixture(scope="session")
def key(tmp_path_factory):
    """Provides the path of the cluster key that all tests of this folder use."""
    return new_key(tmp_path_factory.mktemp("key"))


@pytest.fixture
def make_node(tmp_path, key):
    """Starts nodes with stub agents. All of them end after the test."""
    before, nodes = shm_entries(), []

    def make(*options, **more):
        nodes.append(NodeProcess(tmp_path / f"node{len(nodes)}", more.pop("key", key), *STUB, *options, **more))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()
    assert shm_entries() == before


@pytest.fixture
def pool(key):
    """Provides the node pool of a server, which connects to the nodes of a test."""
    nodes = NodePool(ClusterKey(str(key)))
    yield nodes
    nodes.close()


@pytest.fixture
def make_executor(tmp_path, pool):
    """Makes and starts the executor of a replica whose agents are on a node of ``pool``."""
    made = []

    def make(*overrides, replica=0, report=None, model=None):
        config = small_config(tmp_path, overrides)
        note = report or (lambda rank, stage, done, total: None)
        files = model_files(config) if model is None else model
        starter = RemoteStarter(config, replica, pool, lambda: files, note)
        executor = AgentExecutor(config, (), tmp_path, replica=replica, start_group=starter)
        pool.on_change(executor.wake)
        made.append(executor)
        executor.start()
        return executor

    yield make
    for executor in made:
        executor.close()
