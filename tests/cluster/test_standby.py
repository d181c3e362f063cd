"""Tests when a server wants nodes, how it learns their start time, and the search for nodes by a DNS name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llm_serving.cluster.dialling import Address
from llm_serving.cluster.key import ClusterKey, make_key
from llm_serving.cluster.named_nodes import NamedNodes, Resolve, resolve
from llm_serving.cluster.nodes import NodePool, NodeState
from llm_serving.cluster.standby import Standby
from llm_serving.routing.pools import PoolState
from support.fakes import RecordingLog


class Clocked:
    """A standby with a clock, as an engine thread uses it."""

    def __init__(self, idle_s: float) -> None:
        self.standby = Standby(idle_s)
        self.now = 50.0
        self.changes: list[bool] = []
        self.standby.on_change(lambda: self.changes.append(self.standby.is_wanted))

    def after(self, seconds: float, *, idle: bool, ready: bool) -> Standby:
        self.now += seconds
        self.standby.note(is_idle=idle, is_ready=ready, now=self.now)
        return self.standby


def test_nodes_are_wanted_from_the_first_request_until_some_time_after_the_last_one() -> None:
    engine = Clocked(10.0)
    assert not engine.after(0, idle=True, ready=False).is_wanted
    assert not engine.after(100, idle=True, ready=False).is_wanted
    assert engine.standby.due is None, "an idle server sleeps"
    assert engine.after(1, idle=False, ready=False).is_wanted
    assert engine.after(3, idle=False, ready=True).is_wanted
    assert engine.after(1, idle=True, ready=True).due == engine.now + 10.0
    assert engine.after(9, idle=True, ready=True).is_wanted
    assert engine.after(0.5, idle=False, ready=True).due is None, "a request begins the time anew"
    engine.after(1, idle=True, ready=True)
    assert engine.after(9.5, idle=True, ready=True).is_wanted
    assert not engine.after(0.5, idle=True, ready=True).is_wanted
    assert engine.changes == [True, False]


def test_the_time_until_nodes_are_ready_is_learnt() -> None:
    engine = Clocked(1.0)
    assert engine.after(0, idle=True, ready=False).expected_s(engine.now) is None
    engine.after(0, idle=False, ready=False)
    assert engine.after(3, idle=False, ready=False).expected_s(engine.now) is None
    assert engine.after(5, idle=False, ready=True).expected_s(engine.now) == 0.0
    assert engine.standby.wake_s == 8.0
    engine.after(1, idle=True, ready=True)
    engine.after(1, idle=True, ready=True)
    assert engine.after(1, idle=True, ready=False).expected_s(engine.now) == 8.0
    engine.after(100, idle=False, ready=False)
    assert engine.after(2, idle=False, ready=False).expected_s(engine.now) == 6.0, "two seconds have passed"
    assert engine.after(20, idle=False, ready=False).expected_s(engine.now) == 0.0
    engine.after(2, idle=False, ready=True)
    assert engine.standby.wake_s == 16.0, "the latest start has half of the weight"


def test_a_request_that_ends_before_a_node_joins_teaches_nothing() -> None:
    engine = Clocked(1.0)
    engine.after(0, idle=False, ready=False)
    engine.after(5, idle=True, ready=False)
    engine.after(1, idle=True, ready=False)
    assert not engine.standby.is_wanted
    engine.after(60, idle=False, ready=False)
    engine.after(4, idle=False, ready=True)
    assert engine.standby.wake_s == 4.0


def test_a_refused_request_wants_nodes_until_some_time_after_its_retry() -> None:
    engine = Clocked(2.0)
    engine.after(0, idle=False, ready=False)
    engine.after(8, idle=True, ready=True)
    assert not engine.after(2, idle=True, ready=True).is_wanted
    assert not engine.after(1, idle=True, ready=False).awaits_retry(engine.now)
    engine.standby.note_refused(engine.now)
    assert engine.after(0, idle=True, ready=False).is_wanted
    assert engine.standby.due == engine.now + 8.0 + 2.0, "the start takes 8 s, and the wait for the retry 2 s"
    engine.after(3, idle=False, ready=False)
    assert engine.after(0, idle=True, ready=False).due == engine.now + 5.0 + 2.0, "another request has ended"
    assert engine.after(6, idle=True, ready=False).awaits_retry(engine.now), "the machine is late"
    assert not engine.after(0, idle=True, ready=True).awaits_retry(engine.now)
    assert engine.after(0.5, idle=True, ready=True).is_wanted
    assert not engine.after(0.5, idle=True, ready=True).is_wanted
    assert engine.changes == [True, False, True, False]


def test_each_pool_wants_its_nodes_by_its_own_requests() -> None:
    standby, changes = Standby(10.0, ["short", "long"]), list[str]()
    states = {"short": PoolState(is_idle=True, is_ready=False), "long": PoolState(is_idle=True, is_ready=False)}
    standby.watch_pools(lambda: states)
    for name in states:
        standby.of_pool(name).on_change(lambda name=name: changes.append(name))

    def wanted(now: float, **idle: bool) -> dict[str, bool]:
        states.update({name: PoolState(is_idle=one, is_ready=True) for name, one in idle.items()})
        is_idle = all(state.is_idle for state in states.values())
        standby.note(is_idle=is_idle, is_ready=True, now=now)
        return {name: standby.of_pool(name).is_wanted for name in ("", *states)}

    assert wanted(1.0) == {"": False, "short": False, "long": False}
    assert wanted(2.0, short=False) == {"": True, "short": True, "long": False}
    assert wanted(3.0, short=True, long=False) == {"": True, "short": True, "long": True}
    assert standby.due == 13.0, "the pool short becomes unwanted although the server is busy"
    assert wanted(13.0) == {"": True, "short": False, "long": True}
    assert wanted(14.0, long=True)[""]
    assert standby.due == 24.0
    assert wanted(24.0) == {"": False, "short": False, "long": False}
    assert changes == ["short", "long", "short", "long"]


def test_a_refused_request_wants_the_nodes_of_all_pools_because_its_prompt_is_not_known() -> None:
    standby = Standby(2.0, ["short", "long"])
    standby.note_refused(5.0)
    assert [standby.of_pool(name).is_wanted for name in ("", "short", "long")] == [True, True, True]


@pytest.fixture
def pool(tmp_path: Path):
    make_key(tmp_path / "key")
    pool = NodePool(ClusterKey(tmp_path / "key"))
    yield pool
    pool.close()


def looked_once(pool: NodePool, find: Resolve) -> NamedNodes:
    """Returns nodes of a name whose thread has looked once and has ended, so that only the test looks from now on."""
    nodes = NamedNodes(Address("agents", 9), pool, find)
    nodes.close()
    nodes._thread.join()
    return nodes


def test_nodes_follow_the_addresses_of_a_name(pool: NodePool) -> None:
    found = {"127.0.0.1", "::1"}
    nodes = looked_once(pool, lambda name: set(found))

    def names() -> list[str]:
        nodes.look()
        return sorted(str(node["name"]) for node in pool.status())

    assert names() == ["127.0.0.1:9", "[::1]:9"]
    found.remove("::1")
    assert names() == ["127.0.0.1:9"]
    found.clear()
    assert names() == [], "a name without addresses, as a pool of no pods has it"
    found.add("127.0.0.1")
    assert names() == ["127.0.0.1:9"]
    pool.remove("127.0.0.1:9")
    assert names() == [], "an operator has removed it"


def test_a_node_that_a_replica_has_just_taken_keeps_its_requests(
    pool: NodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"127.0.0.1"}
    nodes = looked_once(pool, lambda name: set(found))
    node, stale = pool.add("127.0.0.1:9"), [{"name": "127.0.0.1:9", "state": "free"}]
    with pool._changed:
        node.state = NodeState.USED
    found.clear()
    with monkeypatch.context() as patch:
        patch.setattr(pool, "status", lambda: stale)  # the replica takes the node after this answer
        nodes.look()
    assert [each["state"] for each in pool.status()] == ["used"]
    pool.give_back(node)
    nodes.look()
    assert pool.status() == []


def test_a_drained_node_is_forgotten_with_its_address_and_used_when_the_address_is_back(pool: NodePool) -> None:
    found = {"127.0.0.1"}
    nodes = looked_once(pool, lambda name: set(found))
    pool.drain("127.0.0.1:9", 0.0)
    nodes.look()
    assert [node["state"] for node in pool.status()] == ["drained"]
    found.clear()
    nodes.look()
    assert pool.status() == []
    found.add("127.0.0.1")
    nodes.look()
    assert [node["state"] for node in pool.status()] in (["connecting"], ["down"])


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM])
def test_a_failed_look_up_changes_no_node(pool: NodePool, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    log = RecordingLog()
    pool.log_to(log)
    nodes = NamedNodes(Address("127.0.0.1", 9), pool)
    nodes.close()
    nodes._thread.join()  # its one look has added the node

    def fail(*args: object, **named: object) -> None:
        raise socket.gaierror(code, "the look-up failed")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fail)
        nodes.look()
        nodes.look()
    assert [node["name"] for node in pool.status()] == ["127.0.0.1:9"]
    assert [each["address"] for each in log.named("node_lookup_failed")] == ["127.0.0.1:9"], "it is logged once"


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_a_name_without_addresses_is_no_failure(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*args: object, **named: object) -> None:
        raise socket.gaierror(code, "no address")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert resolve(Address("agents", 9)) == set()


def test_a_name_is_looked_up() -> None:
    assert "127.0.0.1" in resolve(Address("localhost", 80))
