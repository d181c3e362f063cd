"""Tests nodes that name a pool by prompt length: which names are refused, and which replicas use the nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.agent_host.main import EXIT_USAGE, main
from llm_serving.cluster import commands, remote_starter
from llm_serving.cluster.dialling import Address, NodeRefusedError, dial, read_address
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.messages import Welcome
from llm_serving.cluster.nodes import Node, NodePool, NodeState
from llm_serving.cluster.program import own_program
from llm_serving.cluster.remote_starter import RemoteStarter
from llm_serving.cluster.standby import Standby
from support.block_node import wait_for
from support.small_configs import small_config


@pytest.mark.parametrize(
    ("pools", "known"),
    [
        (["short", "long"], "the pools are short, long"),
        ([], r"the server has no pools \(parallel_config.pools\)"),
    ],
)
def test_a_node_of_an_unknown_pool_is_refused_with_the_known_names(
    make_node: Any, key: Path, pools: list[str], known: str
) -> None:
    node = make_node("--pool", "medium")
    with pytest.raises(NodeRefusedError, match=f"the node serves the pool 'medium', which is unknown; {known}"):
        dial(read_address(node.address), ClusterKey(str(key)), pools)


def test_a_server_shows_the_pool_of_a_node_and_why_it_refuses_another(make_node: Any, key: Path) -> None:
    pool = NodePool(ClusterKey(str(key)), ["short", "long"])
    try:
        short, medium, unbound = make_node("--pool", "short"), make_node("--pool", "medium"), make_node()
        for node in (short, medium, unbound):
            pool.add(node.address)
        wait_for(lambda: [each["state"] for each in pool.status()] == ["free", "refused", "free"])
        shown = pool.status()
        assert [each.get("pool") for each in shown] == ["short", None, None]
        assert "'medium', which is unknown; the pools are short, long" in str(shown[1]["reason"])
        assert (pool.has_nodes_of("short"), pool.has_nodes_of("long")) == (True, False)
    finally:
        pool.close()


def test_a_version_of_a_model_may_add_pools(key: Path) -> None:
    pool = NodePool(ClusterKey(str(key)), ["short"])
    pool.allow_pools(["long", "short"])
    assert pool._prompt_pools == ("short", "long")
    pool.close()


def test_a_name_that_no_pool_can_have_is_refused(key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--key-file", str(key), "--pool", "a b"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: --pool: 'a b' is not a name of a pool; use at most 63 letters")


def test_the_status_command_shows_the_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = {"name": "a:1", "state": "used", "replica": 1, "reason": "", "pool": "short"}
    other = {"name": "b:2", "state": "down", "replica": None, "reason": "no route", "pool": None}
    monkeypatch.setattr(commands, "_send", lambda *_: {"nodes": [used, other]})
    assert commands.main(["status"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["a:1", "used", "replica", "1", "pool", "short"], ["b:2", "down", "no", "route"]]


class Nodes:
    """A pool with free nodes that no thread connects to, and starters that only note which nodes they got."""

    def __init__(self, pool: NodePool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = pool
        self._config = small_config(folder, [])
        monkeypatch.setattr(remote_starter, "RemoteGroup", lambda *given: SimpleNamespace(node=given[2], given=given))

    def add(self, name: str, prompt_pool: str = "") -> Node:
        node = self.pool._nodes[name] = Node(name, Address("localhost", 1))
        node.welcome = Welcome(own_program(), name, 1, 1 << 40, "a test", 1, prompt_pool)
        node.state = NodeState.FREE
        return node

    def start(self, replica: int, prompt_pool: str, standby: Standby | None = None) -> Any:
        """Starts the agents of a replica. Returns the group, or None if the replica gets no node."""
        parts = (self._config, replica, self.pool, dict, lambda *progress: None, standby, None, prompt_pool)
        return RemoteStarter(*parts)()

    def node_of(self, replica: int, prompt_pool: str) -> str | None:
        group = self.start(replica, prompt_pool)
        return None if group is None else group.node.name


@pytest.fixture
def nodes(pool: NodePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(pool, tmp_path, monkeypatch)


def test_a_node_serves_only_replicas_of_its_pool(nodes: Nodes) -> None:
    nodes.add("a", "short")
    assert nodes.node_of(0, "long") is None
    assert nodes.node_of(0, "") is None, "a server without pools refuses the node; this is only a second check"
    assert nodes.node_of(1, "short") == "a"


def test_replicas_of_a_pool_with_nodes_use_no_others(nodes: Nodes) -> None:
    """If the replica took the node that names no pool, a replica of another pool could be left without a node."""
    nodes.add("any")
    bound = nodes.add("a", "short")
    assert nodes.node_of(1, "short") == "a"
    bound.state = NodeState.DOWN
    assert nodes.node_of(1, "short") is None, "the lost node may return"
    assert nodes.node_of(0, "long") == "any"
    nodes.pool.remove("a")
    nodes.add("other")
    assert nodes.node_of(1, "short") == "other", "without a node of its own, the pool uses nodes that name no pool"


def test_a_pool_that_loses_its_last_node_is_told_to_look_at_other_nodes(nodes: Nodes) -> None:
    woken: list[bool] = []
    nodes.add("a", "short").state = NodeState.DOWN
    nodes.pool.on_change(lambda: woken.append(nodes.pool.has_nodes_of("short")))
    assert nodes.pool.remove_if("a", [NodeState.DOWN])
    assert woken == [False]


def test_nodes_of_an_idle_pool_are_not_used_and_nodes_without_a_pool_are(nodes: Nodes) -> None:
    standby = Standby(5.0, ["short", "long", "middle"])
    nodes.add("a", "short")
    nodes.add("b", "long")
    nodes.add("any")
    standby.is_wanted = standby.of_pool("short").is_wanted = True
    assert nodes.start(0, "long", standby) is None
    group = nodes.start(1, "short", standby)
    assert group.node.name == "a"
    assert group.given[6] is standby.of_pool("short"), "the agents end when their pool is idle"
    group = nodes.start(2, "middle", standby)
    assert group.node.name == "any"
    assert group.given[6] is standby, "the agents end when the whole server is idle"
