"""Tests groups that span two nodes: real nodes with agents without a model, TLS on the loopback address."""

from __future__ import annotations

import signal

import pytest

from llm_serving.cluster import messages as link
from llm_serving.errors import AgentLostError
from llm_serving.executor.base import AgentLeaving, AgentLost, AgentReady, AgentStatus
from llm_serving.executor.hccl_cluster import ClusterPlace
from support.executor_steps import events_until, prefill, results
from support.small_configs import small_config
from support.stub_agent import DIE, HANG, RAISE, SLOW, stub_token

SPAN = (
    "parallel_config.executor=nodes",
    "parallel_config.cluster_key_file=key",
    "parallel_config.nodes_per_replica=2",
    "parallel_config.tensor_parallel=2",
)


def used(pool):
    return sorted(str(node["name"]) for node in pool.status() if node["state"] == "used")


@pytest.fixture
def spanning(make_node, make_executor, pool):
    """Provides an executor whose two agents are on two nodes, and these nodes."""
    nodes = [make_node() for _ in range(2)]
    for number, node in enumerate(nodes):
        pool.add(node.address, f"node{number}")
    executor = make_executor(*SPAN)
    events_until(executor, AgentReady)
    return executor, nodes


@pytest.mark.parametrize("stages", [1, 2])
def test_agents_on_two_nodes_answer_together(make_node, make_executor, pool, stages):
    stages_of, nodes = [], [make_node() for _ in range(2)]
    for number, node in enumerate(nodes):
        pool.add(node.address, f"node{number}")
    report = lambda rank, stage, done, total: stages_of.append((rank, stage))  # noqa: E731
    executor = make_executor(*SPAN, f"parallel_config.pipeline_parallel={stages}", report=report)
    [ready] = events_until(executor, AgentReady)
    size = 2 * stages
    assert (ready.summary["agents"], sorted(ready.summary["node"].split(", "))) == (size, ["node0", "node1"])
    assert {rank for rank, stage in stages_of if stage == "warm up"} == set(range(size))
    assert [len(node.agents()) for node in nodes] == [stages, stages]
    executor.submit(prefill(0, 5, row=3, top_logits=2))
    [result] = results(executor, 1)
    assert result.sampled_ids == [stub_token(1, 3)]
    assert result.tops == [((0, 0.0), (1, -1.0))]
    assert result.graph_us == 11 + size - 2, "the time of the agent that samples"
    executor.request_status()
    [status] = events_until(executor, AgentStatus)
    assert [agent["rank"] for agent in status.agents] == list(range(size))


def test_the_agents_start_when_enough_nodes_are_free(make_node, make_executor, pool):
    executor = make_executor(*SPAN)
    pool.add(make_node().address, "first")
    while pool.status()[0]["state"] != "free":
        executor.poll(0.1)
    executor.poll(0.1)
    assert executor.agents()[0]["state"] == "waiting for a node"
    assert pool.status()[0]["state"] == "free", "a replica takes all of its nodes or none"
    pool.add(make_node().address, "second")
    events_until(executor, AgentReady)
    assert used(pool) == ["first", "second"]


@pytest.mark.parametrize(
    ("fault", "phrase"),
    [
        ("agents killed by their step", "signal 9"),
        ("agent of the second node killed", "signal 9"),
        ("second node killed", "closed the link|link broke"),
    ],
)
def test_a_lost_agent_or_node_restarts_the_whole_group(spanning, make_node, pool, fault, phrase):
    executor, nodes = spanning
    before = {agent["pid"] for agent in executor.agents()}
    pool.add(make_node().address, "reserve")
    executor.submit(prefill(0, DIE if fault == "agents killed by their step" else HANG))
    if fault == "second node killed":
        nodes[1].send_signal(signal.SIGKILL)
    if fault == "agent of the second node killed":
        nodes[1].agents()[0].send_signal(signal.SIGKILL)
    [*_, lost] = events_until(executor, AgentLost)
    assert any(each in lost.error for each in phrase.split("|")), lost.error
    assert not lost.final
    events_until(executor, AgentReady)
    assert not before & {agent["pid"] for agent in executor.agents()}
    executor.submit(prefill(1, 5))
    assert results(executor, 1)[0].sampled_ids == [stub_token(1, 0)]
    if fault == "second node killed":
        assert "reserve" in used(pool)


def test_agents_that_hang_on_all_nodes_are_replaced(spanning):
    executor, _ = spanning
    executor.submit(prefill(0, HANG))
    [*_, lost] = events_until(executor, AgentLost, timeout_s=60.0)
    assert "all agents on node" in lost.error
    assert "have done nothing for too long in the middle of a step" in lost.error
    events_until(executor, AgentReady)
    executor.submit(prefill(1, 5))
    assert results(executor, 1)[0].sampled_ids == [stub_token(1, 0)]


def test_a_group_is_lost_if_all_agents_with_a_step_stay_quiet(spanning):
    """An agent that has replied waits for the server, so it does not matter whether it is quiet."""
    group = spanning[0].group
    for quiet, open_steps, is_lost in (
        ([True, True], [1, 1], True),
        ([True, False], [1, 1], False),
        ([False, True], [0, 1], True),
        ([False, False], [0, 1], False),
        ([False, False], [0, 0], False),
    ):
        set_quiet(group, quiet, open_steps)
        assert is_lost_after_looks(group, looks=11) is is_lost


def test_an_agent_whose_input_is_on_the_way_is_not_lost(spanning):
    """A stage has waited long for a slow stage. The slow stage replies before its data have reached the waiting one."""
    group = spanning[0].group
    set_quiet(group, [False, True], [1, 1])
    assert not is_lost_after_looks(group, looks=30)
    set_quiet(group, [False, True], [0, 1])
    assert not is_lost_after_looks(group, looks=9)
    set_quiet(group, [False, False], [0, 1])
    assert not is_lost_after_looks(group, looks=1)
    set_quiet(group, [False, True], [0, 1])
    assert not is_lost_after_looks(group, looks=7), "the time begins again"
    assert not is_lost_after_looks(group, looks=0, pause_s=60.0), "a message may have arrived while the server paused"
    set_quiet(group, [False, False], [0, 0])


def set_quiet(group, quiet, open_steps):
    for part, value, count in zip(group._parts, quiet, open_steps, strict=True):
        part._handle(link.Quiet(value))
        part._unanswered = dict.fromkeys(range(count), 1)


def is_lost_after_looks(group, looks, pause_s=0.0):
    """Looks at the group every 0.5 s of an imagined time, which goes on after the last look of an earlier call."""
    for number in range(looks + bool(pause_s)):
        group._looked_at, now = 0.0, pause_s if number == looks else 0.5
        try:
            group.look(now, now, [])
        except AgentLostError:
            return True
    return False


def test_a_step_that_all_agents_refuse_harms_no_other(spanning):
    executor, _ = spanning
    executor.submit(prefill(0, RAISE))
    executor.submit(prefill(1, 5))
    first, second = results(executor, 2)
    assert first.error == "ZeroDivisionError: something nobody thought of"
    assert second.sampled_ids == [stub_token(1, 0)]


def test_a_drained_node_ends_the_group_after_its_step(spanning, make_node, pool):
    executor, _ = spanning
    executor.submit(prefill(0, SLOW))
    pool.drain("node1", 60.0)
    events = events_until(executor, AgentLeaving)
    if not any(getattr(event, "sampled_ids", None) for event in events):
        results(executor, 1)
    executor.release()
    pool.add(make_node().address, "reserve")
    events_until(executor, AgentReady)
    assert used(pool) == ["node0", "reserve"]


def test_the_other_nodes_learn_where_the_agents_of_ascends_meet(spanning, tmp_path):
    """No device of this machine is an Ascend, so the nodes of this test need no cluster, and reply so."""
    executor, _ = spanning
    assert executor.group is not None
    config = small_config(tmp_path, SPAN)
    assert ClusterPlace.of(config) is None
    sent = []
    parts = executor.group._parts
    for part in parts:
        part.start = sent.append
    parts[0].on_cluster = executor.group._start_others
    parts[0]._handle(link.ClusterAt(link.Place("127.0.0.1", 4711)))
    assert [(share.number, share.cluster) for share in sent] == [(1, link.Place("127.0.0.1", 4711))]
    for part in parts:
        del part.start
