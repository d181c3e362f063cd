"""Tests which thread uses the link of a node: the node's own thread, or the thread of the replica that uses the node.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time

import pytest

from llm_serving.cluster import channel, nodes, remote_starter
from llm_serving.cluster.dialling import Address
from llm_serving.cluster.messages import BEAT_S, Welcome
from llm_serving.cluster.nodes import Node, NodeState
from llm_serving.cluster.program import own_program
from llm_serving.cluster.remote_group import RemoteGroup
from llm_serving.cluster.remote_starter import RemoteStarter
from llm_serving.errors import AgentStartError, ProtocolError
from support.small_configs import small_config
from support.time_limits import time_limit

FIRST_HIGH_DESCRIPTOR = 1024
"""``select.select`` refuses this descriptor and all higher ones."""


class FakeChannel:
    """The link of a node, over one end of ``pair``. Notes when signs of life are sent."""

    def __init__(self) -> None:
        self.pair = socket.socketpair()
        self.last_received = float("inf")
        self.num_received = 0
        self.sent_at: list[float] = []
        self.has_sent_two = threading.Event()

    def fileno(self) -> int:
        return self.pair[0].fileno()

    def receive_available(self) -> list[bytes]:
        self.num_received += 1
        return []

    def send(self, payload: bytes) -> None:
        self.sent_at.append(time.monotonic())
        if len(self.sent_at) == 2:
            self.has_sent_two.set()

    def close(self) -> None:
        self.pair[0].close()

    @property
    def is_closed(self) -> bool:
        return self.fileno() == -1


@pytest.fixture
def held(pool):
    """Provides a free node, its channel, and the thread that uses its link."""
    node, channel = Node("one", Address("localhost", 1)), FakeChannel()
    pool._nodes["one"] = node
    is_free = threading.Event()
    pool.on_change(is_free.set)
    thread = threading.Thread(target=pool._hold, args=(node, channel, None), daemon=True)
    thread.start()
    assert is_free.wait(time_limit(10.0))
    yield node, channel, thread
    channel.close()
    channel.pair[1].close()
    pool.close()
    thread.join(time_limit(10.0))
    assert not thread.is_alive()


@pytest.fixture
def high_descriptors():
    """Makes every new file descriptor too large for ``select.select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * FIRST_HIGH_DESCRIPTOR:
        pytest.skip(f"a process may have only {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FIRST_HIGH_DESCRIPTOR), hard))
    used = [os.open(os.devnull, os.O_RDONLY)]
    while used[-1] < FIRST_HIGH_DESCRIPTOR:
        used.append(os.dup(used[0]))
    yield
    for descriptor in used:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thread_with_a_high_descriptor_sleeps_between_signs_of_life(high_descriptors, held):
    _, channel, _ = held
    assert channel.fileno() >= FIRST_HIGH_DESCRIPTOR
    assert channel.has_sent_two.wait(time_limit(10.0))
    assert channel.sent_at[1] - channel.sent_at[0] > 0.9 * BEAT_S
    assert channel.num_received <= 4, "the thread looked at the link without a cause"


def test_a_sign_of_life_is_sent_only_when_it_is_due():
    channel = FakeChannel()
    assert nodes._beat(channel, is_due=False) is None
    assert (channel.num_received, len(channel.sent_at)) == (1, 0)
    assert nodes._beat(channel, is_due=True) is None
    assert (channel.num_received, len(channel.sent_at)) == (2, 1)
    for each in channel.pair:
        each.close()


@pytest.mark.parametrize("command", ["drain", "remove"])
def test_a_link_that_a_replica_has_taken_stays_open(held, pool, command):
    node, channel, thread = held
    assert pool.take(0, 1) == [node]
    assert pool.drain("one", 60.0) is node if command == "drain" else pool.remove("one") is node
    thread.join(time_limit(10.0))
    assert not thread.is_alive()
    assert not channel.is_closed
    assert node.channel is channel


def test_unreadable_files_of_the_model_take_no_node(held, pool, tmp_path):
    def unreadable():
        raise AgentStartError("the files of the model cannot be read")

    starter = RemoteStarter(small_config(tmp_path, []), 0, pool, unreadable, lambda *progress: None)
    with pytest.raises(AgentStartError, match="cannot be read"):
        starter()
    assert (held[0].state, held[0].replica) == (NodeState.FREE, None)


def test_a_node_whose_agents_cannot_be_started_is_given_back(held, pool, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise ProtocolError("a frame is too long")

    monkeypatch.setattr(remote_starter, "RemoteGroup", refuse)
    node, channel, _ = held
    node.welcome = Welcome(own_program(), "here", 1, memory_bytes=1 << 40, memory_from="a test", cores=1)
    starter = RemoteStarter(small_config(tmp_path, []), 0, pool, dict, lambda *progress: None)
    with pytest.raises(AgentStartError, match="node one: the agents could not be started there: a frame is too long"):
        starter()
    assert channel.is_closed
    assert (node.state, node.replica, node.num_losses) == (NodeState.CONNECTING, None, 1)


def test_a_node_that_does_not_read_is_lost(pool, tmp_path, monkeypatch):
    """The link accepts no frames, and the node still sends signs of life."""
    monkeypatch.setattr(channel, "MAX_UNSENT_FRAMES", 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    link = channel.SecureChannel(ends[0])
    monkeypatch.setattr(link, "flush", lambda: None)
    node = Node("one", Address("localhost", 1))
    node.channel = link
    pool._nodes["one"] = node
    group = RemoteGroup(small_config(tmp_path, []), 0, node, pool, {}, lambda *progress: None)
    link.last_received = float("inf")
    for _ in range(2):
        group.look(0.0, 0.0, ())
        group._send(b"x")
    group._send(b"x")
    assert group.next_look(None) == 0.0
    with pytest.raises(AgentStartError, match="node one: the peer has not read the last 3 frames"):
        group.look(0.0, 0.0, ())
    group.kill()
    ends[1].close()
