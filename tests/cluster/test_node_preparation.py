"""Tests a node that prepares the start of its agents.

The node sends signs of life meanwhile. It frees reserved memory that no run uses.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from llm_serving.agent_host import preparation
from llm_serving.agent_host.preparation import RunMemory
from llm_serving.agent_host.session import LinkEndedError, Session
from llm_serving.agent_host.settings import NodeSettings
from llm_serving.cluster import messages as link
from llm_serving.cluster.channel import SecureChannel
from llm_serving.errors import AgentLostError, AgentStartError
from llm_serving.executor.vitals import STOPPED_S, Vitals
from llm_serving.ipc import messages
from support.small_configs import small_config
from support.time_limits import time_limit

TEXT = "/dev/shm has no room"
SPAN = (
    *("parallel_config.executor=nodes", "parallel_config.cluster_key_file=key"),
    *("parallel_config.nodes_per_replica=2", "parallel_config.tensor_parallel=2"),
)


class Channel:
    """The link of a node. The server has sent ``frames`` and, if ``has_ended``, closed the link then."""

    events = selectors.EVENT_READ
    own_host = "127.0.0.1"

    def __init__(self, *frames):
        self.frames, self.has_ended, self.sent = list(frames), False, []
        self.changed = threading.Condition()
        self.is_closed = threading.Event()
        self.pair = socket.socketpair()
        self.pair[1].send(b"x")

    def fileno(self):
        return self.pair[0].fileno()

    @property
    def last_received(self):
        return time.monotonic()

    def flush(self):
        pass

    def receive_available(self):
        self.pair[0].recv(1)
        frames, self.frames = self.frames, []
        return None if self.has_ended else frames

    def end(self):
        self.has_ended = True
        self.pair[1].send(b"x")

    def send(self, payload):
        with self.changed:
            self.sent.append(payload)
            self.changed.notify_all()

    def has_sent(self, payload, count):
        """Waits until ``payload`` was sent ``count`` times."""
        with self.changed:
            return self.changed.wait_for(lambda: self.sent.count(payload) >= count, time_limit(10.0))

    def close(self):
        for each in self.pair:
            each.close()
        self.is_closed.set()


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Provides a link whose server has asked for agents. The test decides how the memory is created."""
    monkeypatch.setattr(preparation, "check_node", lambda config, files: None)
    channel = Channel(link.control(link.Start(small_config(tmp_path).to_json(), {})))
    notes = []
    settings = NodeSettings(tmp_path, tmp_path / "adapters")
    found = SimpleNamespace(channel=channel, notes=notes, it=Session(channel, settings, notes.append, None))
    found.stop = socket.socketpair()
    yield found
    for each in found.stop:
        each.close()


def test_a_node_reports_when_its_agents_begin_and_end_to_do_nothing(session):
    node = session.it
    group = SimpleNamespace(is_quiet=lambda last_sign: last_sign < 10.0)
    node.bridge = SimpleNamespace(last_update=5.0)
    node._report_quiet(group)
    assert session.channel.sent == [], "the agents have no step"
    node._in_flight[0] = 1
    node._report_quiet(group)
    node._report_quiet(group)
    node.bridge.last_update = 11.0
    node._report_quiet(group)
    node.bridge.last_update = 5.0
    node._report_quiet(group)
    node._last_data = 11.0
    node._report_quiet(group)
    changes = (True, False, True, False)
    assert session.channel.sent == [link.control(link.Quiet(is_quiet)) for is_quiet in changes]


def give_step(node, num_masks):
    """Gives the node a step in slot 0."""
    node._group = SimpleNamespace(links=[1], slots=[SimpleNamespace(num_masks=num_masks, seq=0, num_seqs=1)])
    write = SimpleNamespace(write_inputs=lambda seq, contents: None, write_masks=lambda contents: None)
    node._contents = [write]
    node._write(messages.Prefill(seq=0, slot=0), memoryview(b""))


def test_a_node_ignores_sleeping_agents_while_data_arrive_before_their_masks(session):
    """On a slow network, the masks of a step may wait behind the tiles of the next one."""
    node, begun = session.it, time.monotonic()
    node._tiles = SimpleNamespace(write=lambda part: None)
    give_step(node, num_masks=1)
    node._take_data(link.TilePart(0, 0, b"x"))
    assert node._last_data >= begun
    node._last_data = 0.0
    node._write(messages.Masks(seq=0, slot=0), memoryview(b""))
    assert node._last_data >= begun
    node._last_data = 0.0
    node._take_data(link.TilePart(0, 0, b"x"))
    assert node._last_data == 0.0, "the masks have arrived"


def test_data_of_the_server_do_not_count_during_a_step_without_masks(session):
    node = session.it
    node._tiles = SimpleNamespace(write=lambda part: None)
    give_step(node, num_masks=0)
    node._take_data(link.TilePart(0, 0, b"x"))
    assert node._last_data == 0.0


def test_data_of_the_server_do_not_count_after_the_end_of_a_step_with_masks(session):
    node = session.it
    node._tiles = SimpleNamespace(write=lambda part: None)
    give_step(node, num_masks=1)
    node._pass_on(0, messages.StepFailed(seq=0, slot=0, error="refused"))
    node._take_data(link.TilePart(0, 0, b"x"))
    assert node._last_data == 0.0


def test_data_of_the_server_count_only_while_agents_may_wait_for_masks(session, monkeypatch):
    monkeypatch.setattr(messages, "MASK_TIMEOUT_S", 0.0)
    node = session.it
    node._tiles = SimpleNamespace(write=lambda part: None)
    give_step(node, num_masks=1)
    node._take_data(link.TilePart(0, 0, b"x"))
    assert node._last_data == 0.0


def send_parts(session, seconds):
    """Sends the node a part of a tile before each look at its sources."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        session.channel.frames = [link.control(link.TilePart(0, 0, b"x"))]
        session.channel.pair[1].send(b"x")
        session.it._loop_once()


@pytest.mark.parametrize("num_masks", [0, 1])
def test_a_stopped_agent_is_found_while_the_server_sends_data(session, num_masks):
    """The agent is a real process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            node, vitals = session.it, Vitals([process.pid], 0, may_sleep=False, min_sleep_s=link.NODE_PATIENCE_S)

            def look(now, last_result, slots, last_data):
                if (reason := vitals.look(now, last_result, 0.0, 0.0, last_data)) is not None:
                    raise AgentLostError(reason)

            node._tiles = SimpleNamespace(write=lambda part: None)
            give_step(node, num_masks)
            node._group.next_look, node._group.look = vitals.next_look, look
            with pytest.raises(AgentLostError, match=r"was stopped \(SIGSTOP\)"):
                send_parts(session, time_limit(STOPPED_S + 3.0))
        finally:
            process.kill()


def test_a_node_sends_signs_of_life_while_it_reserves_memory(session, monkeypatch):
    has_beaten = []

    def create(config, key, ranks, host, on_cancel):
        count = session.channel.sent.count(link.BEAT)
        has_beaten.append(session.channel.has_sent(link.BEAT, count + 2))
        raise AgentStartError(TEXT)

    monkeypatch.setattr(RunMemory, "create", create)
    session.it.run(session.stop[0].fileno())
    assert has_beaten == [True]
    assert link.control(link.GroupLost(TEXT)) in session.channel.sent
    assert session.notes == [f"the agents are lost: {TEXT}"]


def test_memory_that_is_ready_after_the_end_of_the_link_is_removed(session, monkeypatch):
    closed, has_begun, may_end = [], threading.Event(), threading.Event()
    part = SimpleNamespace(close=lambda: closed.append(1))

    def create(config, key, ranks, host, on_cancel):
        has_begun.set()
        assert may_end.wait(time_limit(10.0))
        return RunMemory(part, part, None, part)

    monkeypatch.setattr(RunMemory, "create", create)
    thread = threading.Thread(target=session.it.run, args=(session.stop[0].fileno(),), daemon=True)
    thread.start()
    assert has_begun.wait(time_limit(10.0))
    session.channel.end()
    assert session.channel.is_closed.wait(time_limit(10.0))
    may_end.set()
    thread.join(time_limit(10.0))
    assert not thread.is_alive()
    assert closed == [1, 1, 1]
    assert session.notes == ["the link has ended: the server closed the link"]


@pytest.mark.parametrize("has_long_call", [True, False], ids=["during-a-long-call", "before-a-long-call"])
def test_the_end_of_the_link_ends_a_long_call_of_the_preparation(session, monkeypatch, has_long_call):
    has_begun, may_call, is_cancelled, results = threading.Event(), threading.Event(), threading.Event(), []

    def create(config, key, ranks, host, on_cancel):
        if has_long_call:
            on_cancel(is_cancelled.set)
        has_begun.set()
        if not has_long_call:
            assert may_call.wait(time_limit(10.0))
            on_cancel(is_cancelled.set)
        results.append(is_cancelled.wait(time_limit(10.0)))
        raise AgentStartError(TEXT)

    monkeypatch.setattr(RunMemory, "create", create)
    thread = threading.Thread(target=session.it.run, args=(session.stop[0].fileno(),), daemon=True)
    thread.start()
    assert has_begun.wait(time_limit(10.0))
    session.channel.end()
    assert session.channel.is_closed.wait(time_limit(10.0))
    may_call.set()
    thread.join(time_limit(20.0))
    assert not thread.is_alive()
    assert results == [True]


def test_memory_that_was_made_before_an_error_is_removed(tmp_path, monkeypatch):
    """The node has made the memory for tiles. Then the memory for the step slots fails, because there is no space."""
    closed = []
    tiles = SimpleNamespace(close=lambda: closed.append("tiles"))

    def refuse(config, ranks):
        raise AgentStartError(TEXT)

    monkeypatch.setattr(preparation, "NodeTiles", SimpleNamespace(of=lambda config: tiles))
    monkeypatch.setattr(preparation, "GroupMemory", SimpleNamespace(create=refuse))
    with pytest.raises(AgentStartError, match=TEXT):
        RunMemory.create(small_config(tmp_path), None, range(1), "127.0.0.1", lambda cancel: None)
    assert closed == ["tiles"]


@pytest.mark.parametrize(
    ("own", "other", "number", "is_refused"),
    [
        ("127.0.0.1", "10.0.0.6", 0, True),
        ("127.0.0.1", "10.0.0.6", 1, True),
        ("127.0.0.1", "localhost", 0, False),
        ("127.0.0.1", "localhost", 1, False),
    ],
)
def test_ascends_of_other_machines_are_not_sent_to_a_loopback_address(
    session, tmp_path, own, other, number, is_refused
):
    pair = small_config(tmp_path, SPAN)
    config = dataclasses.replace(pair, model_config=dataclasses.replace(pair.model_config, device_target="Ascend"))
    session.channel.own_host, places = own, [link.Place(own, 1), link.Place(other, 2)]
    share = link.Share(number, places, bytes(32), None if number == 0 else link.Place(own, 3))
    if is_refused:
        with pytest.raises(LinkEndedError, match=f"reaches this node at {own}, which the other nodes"):
            session.it._take_share(config, share)
        return
    part = session.it._take_share(config, share)
    assert (part.reserved is not None) == (number == 0)
    if part.reserved is not None:
        port = part.reserved.getsockname()[1]
        assert link.control(link.ClusterAt(link.Place(own, port))) in session.channel.sent
        assert part.scheduler == (own, port)
        part.reserved.close()


@pytest.mark.parametrize("found", ["::ffff:10.0.0.5", "10.0.0.5"])
def test_a_mapped_address_has_the_form_of_ipv4(found):
    channel = SimpleNamespace(_socket=SimpleNamespace(getsockname=lambda: (found, 7450, 0, 0)))
    assert SecureChannel.own_host.fget(channel) == "10.0.0.5"
