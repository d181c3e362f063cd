"""Tests transfers of handed blocks between two nodes with stub agents: real processes, and TLS on the loopback address.
"""

from __future__ import annotations

import signal
import time

import numpy as np
import psutil
import pytest

from llm_serving.cluster.block_pools import NodePools
from llm_serving.config.parallel_section import MAX_SENT_BLOCKS
from llm_serving.executor.base import AgentLost, AgentReady
from llm_serving.handover.header import HEADER_BYTES
from llm_serving.handover.transport import TransferError
from llm_serving.ipc.hand_over_memory import HandOverLayout
from llm_serving.ipc.shm import MoveKind
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind
from support.executor_steps import events_until, prefill, results
from support.fake_mooncake import install_fake_mooncake
from support.pool_memory import pool_memories
from support.small_configs import small_config
from support.stub_agent import BAD_BLOCK, stub_token
from support.time_limits import time_limit

ROLES = (
    *("parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]"),
    *("parallel_config.tensor_parallel=2", "serving_config.agent_restart_limit=5"),
)
SPAN = (
    *("parallel_config.nodes_per_replica=2", "parallel_config.executor=nodes"),
    "parallel_config.cluster_key_file=unread",
)
MOONCAKE = (
    *("parallel_config.hand_over_transport=mooncake", "parallel_config.mooncake_unprotected=true"),
    *("parallel_config.executor=nodes", "parallel_config.cluster_key_file=unread"),
)


class Pair:
    """A prefill replica and a decode replica, each with two agents on ``span`` nodes of its own."""

    def __init__(self, make_node, make_executor, pool, folder, *overrides, modules=None, span=1):
        self.nodes, self.executors, self.memories = [], [], []
        layout = HandOverLayout.of(small_config(folder, ROLES), 0)
        for replica in range(2):
            own = [make_node(modules=modules) for _ in range(span)]
            for node in own:
                pool.add(node.address)
            self.executors.append(make_executor(*ROLES, *overrides, replica=replica))
            events_until(self.executors[-1], AgentReady)
            self.memories.append([memory for node in own for memory in pool_memories(node.pid, layout)])
            self.nodes += own
        self.pools = NodePools(self.executors)
        self.num_blocks = layout.num_blocks

    def begin(self, pairs):
        """Begins a transfer. Returns an empty list, to which the end of the transfer appends its error."""
        ended = []
        self.pools.transport(0, 1).transfer(pairs, ended.append)
        return ended

    def wait(self, ended):
        until = time.monotonic() + time_limit(20)
        while not ended:
            assert time.monotonic() < until
            self.executors[0].poll(0.05)
        [error] = ended
        return error


@pytest.fixture
def pair(make_node, make_executor, pool, tmp_path):
    return Pair(make_node, make_executor, pool, tmp_path)


@pytest.fixture
def mooncake_pair(make_node, make_executor, pool, tmp_path):
    """Provides a pair whose nodes use a replacement of Mooncake."""
    (tmp_path / "modules").mkdir()
    install_fake_mooncake(tmp_path / "modules")
    return Pair(make_node, make_executor, pool, tmp_path, *MOONCAKE, modules=tmp_path / "modules")


@pytest.fixture
def spanning_pair(make_node, make_executor, pool, tmp_path):
    """Provides a pair whose replicas have each agent on a node of its own."""
    return Pair(make_node, make_executor, pool, tmp_path, *SPAN, span=2)


@pytest.mark.parametrize("transport", ["pair", "mooncake_pair", "spanning_pair"])
def test_blocks_of_all_agents_travel_from_node_to_node(transport, request):
    pair = request.getfixturevalue(transport)
    rng, written = np.random.default_rng(0), []
    assert [len(memories) for memories in pair.memories] == [2, 2]
    for memory in pair.memories[0]:
        memory.write(rng.bytes(len(memory.read())))
        written.append(memory.read())
    for pairs in ([(1, 1), (4, 4)], [(2, 2)]):
        assert pair.wait(pair.begin(pairs)) is None
    found = [memory.read() for memory in pair.memories[1]]
    memory, blocks = pair.memories[0][0], [1, 2, 4]
    for part in (memory.headers, memory.blocks):
        sent = sorted(part(content)[blocks].tobytes() for content in written)
        assert sorted(part(content)[blocks].tobytes() for content in found) == sent
        assert not any(np.delete(part(content), blocks, axis=0).any() for content in found)


@pytest.mark.parametrize("transport", ["pair", "mooncake_pair"])
def test_a_transfer_to_a_dead_node_fails_and_the_sender_serves_on(transport, request):
    pair = request.getfixturevalue(transport)
    pair.nodes[1].send_signal(signal.SIGKILL)
    error = pair.wait(pair.begin([(1, 1)]))
    assert isinstance(error, TransferError)
    assert "could not be sent" in str(error)
    pair.executors[0].submit(prefill(0, 5, row=3))
    assert results(pair.executors[0], 1)[0].sampled_ids == [stub_token(1, 3)]
    events_until(pair.executors[1], AgentLost)
    assert "were lost before" in str(pair.wait(pair.begin([(1, 1)])))


def test_a_transfer_from_a_dead_node_fails(pair):
    pair.nodes[0].send_signal(signal.SIGSTOP)
    ended = pair.begin([(1, 1)])
    pair.nodes[0].send_signal(signal.SIGKILL)
    assert isinstance(pair.wait(ended), TransferError)


def test_an_engine_of_mooncake_that_dies_fails_transfers_until_it_is_replaced(mooncake_pair):
    pair = mooncake_pair
    for node in pair.nodes:
        for process in psutil.Process(node.pid).children():
            if "llm_serving.handover.mooncake" in process.cmdline():
                process.kill()
    until = time.monotonic() + time_limit(60)
    while pair.wait(pair.begin([(1, 1)])) is not None:  # a read does not wait for a slow start of an engine
        assert time.monotonic() < until
    assert sum("handover.mooncake" in " ".join(each.cmdline()) for each in pair.nodes[0].agents()) == 1


def test_a_node_without_mooncake_is_refused_with_the_reason(make_node, make_executor, pool, tmp_path):
    (tmp_path / "modules").mkdir()
    install_fake_mooncake(tmp_path / "modules", "0.2.1")
    pool.add(make_node(modules=tmp_path / "modules").address)
    executor = make_executor(*ROLES, *MOONCAKE)
    lost = events_until(executor, AgentLost)[-1]
    assert "hand_over_transport: mooncake does not work on this node" in lost.error
    assert "this machine has 0.2.1" in lost.error
    assert [node["state"] for node in pool.status()] == ["refused"]


def test_wrong_transfers_are_refused(pair):
    assert f"at most {MAX_SENT_BLOCKS}" in str(pair.wait(pair.begin([(0, 0)] * (MAX_SENT_BLOCKS + 1))))
    assert isinstance(pair.wait(pair.begin([(0, pair.num_blocks)])), TransferError), "the receiver ends the connection"
    assert pair.wait(pair.begin([(0, 0)])) is None, "the next transfer has a new connection"
    assert isinstance(pair.wait(pair.begin([(pair.num_blocks, 0)])), TransferError), "the node ends the link"


def test_a_transfer_between_spanning_replicas_fails_if_one_part_fails(spanning_pair):
    """``done`` is called once, after all parts have ended."""
    spanning_pair.nodes[3].send_signal(signal.SIGKILL)
    ended = spanning_pair.begin([(1, 1)])
    assert isinstance(spanning_pair.wait(ended), TransferError)
    spanning_pair.executors[0].submit(prefill(0, 5, row=3))
    assert results(spanning_pair.executors[0], 1)[0].sampled_ids == [stub_token(1, 3)]
    events_until(spanning_pair.executors[1], AgentLost)
    assert len(ended) == 1
    assert "were lost before" in str(spanning_pair.wait(spanning_pair.begin([(1, 1)])))


def test_the_marks_of_all_nodes_stay_in_any_order_of_their_replies(spanning_pair):
    first, second = spanning_pair.executors[1].group._parts
    slot = first.slots[0]
    for order in ((first, second), (second, first)):
        slot.write_header(0, num_tokens=0, num_seqs=0, table_width=0, history_len=0, num_moves=3)
        slot.move_faults[:3] = 0
        for part, faults in zip(order, ([0, 1, 0], [0, 0, 1]), strict=True):
            part._write_results(0, memoryview(np.array(faults, np.int32).tobytes()))
        assert slot.move_faults[:3].tolist() == [0, 1, 1]


@pytest.mark.parametrize("placed", ["pair", "spanning_pair"])
def test_the_last_agent_may_report_a_damaged_block(placed, request):
    """The agent with the results replies first. The step must wait for the second agent, which reports the damaged
    block. It may be on another node.
    """
    pair = request.getfixturevalue(placed)
    moves = [BlockMove(MoveKind.HAND_IN, block, 1) for block in (3, BAD_BLOCK)]
    pair.executors[1].submit(ScheduledStep(0, StepKind.MOVE, moves=moves, headers=[bytes(HEADER_BYTES)] * 2))
    [result] = results(pair.executors[1], 1)
    assert result.bad_moves == [1]
