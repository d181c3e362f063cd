"""Tests executors whose agents are on nodes: real processes, TLS on the loopback address, agents without a model."""

from __future__ import annotations

import signal
import time

import msgspec
import pytest

from llm_serving.cluster import messages as link
from llm_serving.cluster.dialling import dial
from llm_serving.executor.base import AgentLeaving, AgentLost, AgentReady, AgentStatus
from llm_serving.ipc import messages
from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind, StepResult
from support.cluster import LinkProxy
from support.executor_steps import events_until, prefill, results, submit_decode_before_prefill
from support.stub_agent import DIE, HANG, REFUSE, SLOW, stub_token
from support.time_limits import time_limit


@pytest.fixture
def linked(make_node, make_executor, pool):
    """Provides an executor with ready agents on a node, and this node."""
    node = make_node()
    pool.add(node.address)
    executor = make_executor("serving_config.agent_restart_limit=5")
    events_until(executor, AgentReady)
    return executor, node


def test_runs_steps_and_reports_progress(make_node, make_executor, pool):
    node, stages = make_node(), []
    pool.add(node.address)
    executor = make_executor(report=lambda *progress: stages.append(progress))
    [ready] = events_until(executor, AgentReady)
    assert (ready.summary["device"], ready.summary["node"]) == ("stub", node.address)
    assert stages == [
        (0, "load weights", 1, 2),
        (0, "load weights", 2, 2),
        (0, "compile", 1, 1),
        (0, "warm up", 1, 1),
    ]
    assert executor.num_free_slots == NUM_SLOTS
    executor.submit(prefill(0, 5, row=3, top_logits=2))
    [result] = results(executor, 1)
    assert result.sampled_ids == [stub_token(1, 3)]
    assert result.tops == [((0, 0.0), (1, -1.0))]
    assert (result.graph_us, result.sample_us) == (11, 22)
    assert executor.num_free_slots == NUM_SLOTS
    [agent] = executor.agents()
    assert agent["pid"] in {process.pid for process in node.agents()}
    executor.request_status()
    [status] = events_until(executor, AgentStatus)
    assert status.agents[0]["steps"] == 1


def test_order_aborts_refusals_and_moves_are_those_of_local_agents(linked):
    executor, _ = linked
    submit_decode_before_prefill(executor)
    assert [each.seq for each in results(executor, 3)] == [0, 2, 1]
    executor.submit(prefill(3, SLOW))
    executor.submit(prefill(4, 5))
    executor.submit(prefill(5, REFUSE))
    executor.submit(ScheduledStep(6, StepKind.MOVE, moves=[BlockMove(MoveKind.COPY, 1, 2)]))
    executor.abort(4)
    found = {each.seq: each for each in results(executor, 4)}
    assert found[3].sampled_ids == [stub_token(1, 0)]
    assert found[4].aborted
    assert found[5].error == "token 203 is refused"
    assert found[6].graph_us == 33


def test_masks_of_a_step_that_the_agent_has_dropped_change_nothing(linked):
    """Masks of a dropped step arrive while its slot is free, and again when the slot has another step."""
    executor, _ = linked
    executor.submit(prefill(0, SLOW))
    executor.submit(prefill(1, 5))
    masks = messages.Masks(seq=1, slot=executor._steps.slot_of[1])
    late = link.carry(messages.encode(masks), contents=bytes(8))
    executor.abort(1)
    assert {each.seq: each.aborted for each in results(executor, 2)} == {0: False, 1: True}
    executor._group._send(late)
    for seq in range(2, 2 + NUM_SLOTS):
        executor.submit(prefill(seq, SLOW))
    assert masks.slot in executor._steps.slot_of.values()
    executor._group._send(late)
    assert [each.sampled_ids for each in results(executor, NUM_SLOTS)] == [[stub_token(1, 0)]] * NUM_SLOTS


def test_a_link_that_cannot_be_watched_is_lost(linked, monkeypatch):
    def refuse(*arguments):
        raise OSError("Bad file descriptor")

    executor, _ = linked
    group = executor._group
    monkeypatch.setattr(group._selector, "modify", refuse)
    group._events = 0
    executor.request_status()
    [*_, lost] = events_until(executor, AgentLost)
    assert "the link broke: Bad file descriptor" in lost.error


def test_a_group_of_two_agents_answers_together(make_node, make_executor, pool):
    pool.add(make_node().address)
    executor = make_executor("parallel_config.tensor_parallel=2")
    events_until(executor, AgentReady)
    executor.submit(prefill(0, 5, row=3))
    [result] = results(executor, 1)
    assert result.sampled_ids == [stub_token(1, 3)]
    assert result.graph_us == 11, "the time of the agent that samples"


@pytest.mark.parametrize(
    ("fault", "phrase"),
    [
        ("agent killed by its step", "signal 9"),
        ("agent stopped", "was stopped (SIGSTOP) in the middle of a step"),
        ("agent asleep", "have done nothing for 5.0 s"),
        ("node killed", "closed the link|link broke"),
        ("node stopped", "no sign of life for"),
        ("link cut", "closed the link|link broke"),
        ("link silent", "no sign of life for"),
    ],
)
def test_a_lost_agent_node_or_link_is_replaced(make_node, make_executor, pool, fault, phrase):
    """The only node is lost in the middle of a step. A second node, which is free, takes over."""
    node = make_node()
    proxy = LinkProxy(node.port)
    try:
        pool.add(proxy.address, "first")
        executor = make_executor()
        events_until(executor, AgentReady)
        agents = node.agents()
        pool.add(make_node().address, "second")
        executor.submit(prefill(0, DIE if fault == "agent killed by its step" else HANG))
        if fault == "agent stopped":
            agents[0].send_signal(signal.SIGSTOP)
        elif fault == "node killed":
            node.send_signal(signal.SIGKILL)
        elif fault == "node stopped":
            node.send_signal(signal.SIGSTOP)
        elif fault == "link cut":
            proxy.cut()
        elif fault == "link silent":
            proxy.hold(held=True)
        [*_, lost] = events_until(executor, AgentLost)
        assert any(each in lost.error for each in phrase.split("|")), lost.error
        assert not lost.final
        assert not lost.is_blameless, "the step may have caused the loss"
        assert executor.num_free_slots == 0
        [*_, ready] = events_until(executor, AgentReady)
        executor.submit(prefill(1, 5))
        assert results(executor, 1)[0].sampled_ids == [stub_token(1, 0)]
        if fault in ("node killed", "node stopped", "link silent"):
            assert ready.summary["node"] == "second"
        if fault == "node stopped":
            node.send_signal(signal.SIGCONT)
        proxy.hold(held=False)
    finally:
        proxy.close()


def test_a_node_that_comes_back_is_used_again(make_node, make_executor, pool):
    node = make_node()
    pool.add(node.address)
    executor = make_executor()
    events_until(executor, AgentReady)
    node.stop()
    events_until(executor, AgentLost)
    while executor.agents()[0]["state"] != "waiting for a node":
        executor.poll(0.2)
    make_node(listen=node.address)
    events_until(executor, AgentReady)


def test_an_executor_waits_for_its_first_node(make_node, make_executor, pool):
    executor = make_executor()
    assert executor.poll(0.2) == []
    assert executor.agents()[0]["state"] == "waiting for a node"
    pool.add(make_node().address)
    events_until(executor, AgentReady)


def test_a_drained_node_completes_its_step_and_is_left(linked, make_node, pool):
    executor, node = linked
    executor.submit(prefill(0, SLOW))
    pool.drain(node.address, 60.0)
    events = events_until(executor, AgentLeaving)
    events += [] if any(isinstance(each, StepResult) for each in events) else events_until(executor, StepResult)
    executor.release()
    assert executor.num_free_slots == 0
    executor.poll(0.1)
    assert executor.agents()[0]["state"] == "waiting for a node"
    assert pool.status()[0]["state"] == "drained"
    other = make_node()
    pool.add(other.address)
    [*_, ready] = events_until(executor, AgentReady)
    assert ready.summary["node"] == other.address
    pool.add(node.address)
    assert pool.status()[0]["state"] != "drained"


def test_requests_of_a_drained_node_move_after_the_time_limit(linked, pool):
    executor, node = linked
    executor.submit(prefill(0, HANG))
    pool.drain(node.address, 0.3)
    [*_, lost] = events_until(executor, AgentLost)
    assert "is drained; its requests move" in lost.error
    assert lost.is_blameless
    assert pool.status()[0]["state"] == "drained"


def test_the_agents_end_when_the_server_says_nothing_more(make_node, make_executor, pool):
    """A proxy keeps the connection open but forwards nothing, so the node must notice the silence itself."""
    node = make_node()
    proxy = LinkProxy(node.port)
    try:
        pool.add(proxy.address)
        executor = make_executor()
        events_until(executor, AgentReady)
        [agent] = node.agents()
        proxy.hold(held=True)
        agent.wait(60)
        assert "sent no sign of life" in node.stderr()
    finally:
        proxy.close()


def test_a_node_with_other_model_files_is_refused(make_node, make_executor, pool):
    pool.add(make_node().address, "other")
    executor = make_executor(model={"model.safetensors": "17 bytes, digest 00"})
    [*_, lost] = events_until(executor, AgentLost)
    assert "node other refused the model: " in lost.error
    [node] = pool.status()
    assert node["state"] == "refused"
    assert "the node's model has other files: config.json" in str(node["reason"])


def test_a_node_without_the_model_is_refused(make_node, make_executor, pool, tmp_path):
    pool.add(make_node("--model", str(tmp_path / "nowhere")).address)
    executor = make_executor()
    [*_, lost] = events_until(executor, AgentLost)
    assert "the node's model lacks config.json" in lost.error


def test_each_node_is_compared_with_the_memory_that_it_reports(make_node, make_executor, pool, monkeypatch):
    small, large = make_node().address, make_node().address

    def dial_small(address, key, pools):
        channel, welcome = dial(address, key, pools)
        assert welcome.memory_bytes > 1 << 28
        assert welcome.cores > 0
        is_small = str(address) == small
        return channel, msgspec.structs.replace(welcome, memory_bytes=1 << 20) if is_small else welcome

    monkeypatch.setattr("llm_serving.cluster.nodes.dial", dial_small)
    pool.add(small)
    executor = make_executor()
    wait_until(lambda: pool.status()[0]["state"] == "refused", executor)
    [node] = pool.status()
    assert node["memory_bytes"] == 1 << 20
    assert "the model does not fit the node: the memory plan needs" in node["reason"]
    assert "of 1.0 MiB (free memory of the machine of the node)" in node["reason"]
    pool.add(large)
    [*_, ready] = events_until(executor, AgentReady)
    assert ready.summary["node"] == large
    assert {each["name"]: each["state"] for each in pool.status()} == {small: "refused", large: "used"}


def wait_until(condition, executor):
    until = time.monotonic() + time_limit(20)
    while not condition():
        assert time.monotonic() < until
        executor.poll(0.05)
