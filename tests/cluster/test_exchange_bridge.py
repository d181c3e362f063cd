"""Tests groups whose agents are on several nodes: real agents, an exchange for each node, TLS on the loopback address.

Each agent attaches the exchange of its own node. The bridges run in the process of the test.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent.group.exchange import Exchange
from llm_serving.agent_host import exchange_bridge
from llm_serving.agent_host.exchange_bridge import MAGIC, ExchangeBridge
from llm_serving.cluster.key import EXCHANGE_PROTOCOL, ClusterKey
from llm_serving.cluster.messages import Place, Share
from llm_serving.config import ParallelConfig
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.introduction import admit, introduce, receive
from support.collective_runs import check_gathers, check_sums, finish, start
from support.sweeps import with_sweeps
from support.time_limits import time_limit

SECRET = bytes(range(32))
BEAT = np.array([0xFFFFFFFF, 0, 0], "<u4").tobytes()


class NodeExchange:
    """The exchange of a node, its bridge, and a listener that passes connections to the bridge."""

    def __init__(self, layout: ExchangeLayout, key: ClusterKey) -> None:
        self.memory, self._key = ExchangeMemory.create(layout), key
        self.bridge: Any = None
        self.notes: list[str] = []
        self.unready: queue.Queue[None] = queue.Queue()
        """Has an element for each connection that was closed because there is no bridge yet."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = Place("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def join(self, share: Share, **limits: float) -> None:
        limits = {"patience_s": time_limit(10.0), "unreached_limit_s": time_limit(60.0), **limits}
        self.bridge = ExchangeBridge(self.memory, share, self._key, self.notes.append, **limits)

    def problem(self) -> str:
        """Waits until a connection has ended, and returns the reason."""
        assert select.select([self.bridge.descriptor], [], [], time_limit(20.0))[0]
        return str(self.bridge.problem)

    def _accept(self) -> None:
        while True:
            try:
                plain = self._listener.accept()[0]
            except OSError:
                return
            try:
                link = self._key.server.wrap_socket(plain, server_side=True)
            except OSError:  # a bridge was closed during its handshake
                plain.close()
                continue
            if self.bridge is None or link.selected_alpn_protocol() != EXCHANGE_PROTOCOL:
                link.close()
                self.unready.put(None)
            else:
                threading.Thread(target=self.bridge.receive, args=(link,), daemon=True).start()

    def close(self) -> None:
        socket.socket.shutdown(self._listener, socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(time_limit(10.0))
        if self.bridge is not None:
            self.bridge.close()
        self.memory.close()


@pytest.fixture
def make_nodes(key: Path) -> Iterator[Any]:
    """Makes the exchanges of a group's nodes, and connects them unless ``joined`` is false."""
    with ExitStack() as owned:

        def make(tp: int, pp: int, num_nodes: int, *, joined: bool = True) -> list[NodeExchange]:
            layout = ExchangeLayout(tp, pp, hidden_size=64, max_tokens=16, max_rows=4)
            nodes = [NodeExchange(layout, ClusterKey(str(key))) for _ in range(num_nodes)]
            for node in nodes:
                owned.callback(node.close)
            places = [node.place for node in nodes]
            for number, node in enumerate(nodes if joined else ()):
                node.join(Share(number, places, SECRET))
            return nodes

        yield make


def run(nodes: Sequence[NodeExchange], size: int, what: str) -> list[dict[str, Any]]:
    """Runs ``what`` in ``size`` agents, which are divided among the nodes in order."""
    each = size // len(nodes)
    return finish([start(nodes[index // each].memory, index, what, bell=True) for index in range(size)])


@pytest.mark.parametrize(("size", "num_nodes"), with_sweeps([(4, 2), (2, 2), (3, 3)], lambda size, nodes: size != 4))
def test_sums_and_gathers_are_those_of_one_machine(make_nodes: Any, size: int, num_nodes: int) -> None:
    check_sums(run(make_nodes(size, 1, num_nodes), size, "sums"))
    check_gathers(run(make_nodes(size, 1, num_nodes), size, "gathers"))


@pytest.mark.parametrize("size", with_sweeps([(2,), (3,)], lambda size: size == 3))
def test_calls_never_mix(make_nodes: Any, size: int) -> None:
    assert run(make_nodes(size, 1, size), size, "race") == [{"wrong": None}] * size


def stage(node: NodeExchange, index: int) -> Exchange:
    """Returns the exchange of stage ``index`` of a pipeline with two stages, each of one agent."""
    parallel = ParallelConfig(pipeline_parallel=2, nodes_per_replica=2)
    place = SimpleNamespace(pp_index=index, tp_index=0)
    part = SimpleNamespace(parallel=parallel, place=place, is_split=False, member=index)
    return Exchange(node.memory, part, time_limit(30.0))  # type: ignore[arg-type]


def test_a_pipeline_passes_activations_and_tokens_between_nodes(make_nodes: Any) -> None:
    nodes = make_nodes(1, 2, 2)
    assert [node.bridge.last_update for node in nodes] == [0.0, 0.0]
    first, last = (stage(node, index) for index, node in enumerate(nodes))
    steps = [np.random.default_rng(n).random((1 + n % 16, 64), np.float32) for n in range(60)]
    found: list[np.ndarray[Any, Any]] = []
    tokens = np.zeros(nodes[0].memory.layout.max_rows, np.int32)

    def compute() -> None:
        last.meet(time_limit(30.0))
        for number, step in enumerate(steps):
            out = np.empty_like(step)
            last.receive(out)
            found.append(out)
            last.post_tokens(tokens + number, tokens - number)

    thread = threading.Thread(target=compute)
    thread.start()
    first.meet(time_limit(30.0))
    for number, step in enumerate(steps):
        first.send(step)
        if number % 3 == 2:
            for step_number in (number, number - 1):
                assert (first.tokens_after(step_number) == [tokens + step_number, tokens - step_number]).all()
    thread.join()
    for step, out in zip(steps, found, strict=True):
        np.testing.assert_array_equal(step, out)
    assert all(node.bridge.last_update > 0.0 for node in nodes)


def test_a_lost_connection_is_reported(make_nodes: Any) -> None:
    nodes = make_nodes(2, 1, 2)
    run(nodes, 2, "gathers")
    assert nodes[0].bridge.problem == ""
    nodes[0].bridge.close()
    assert f"127.0.0.1:{nodes[0].place.port} of the same group ended" in nodes[1].problem()
    nodes[0].bridge = None


def test_a_node_that_is_not_ready_yet_is_asked_again(make_nodes: Any) -> None:
    nodes = make_nodes(2, 1, 2, joined=False)
    places = [node.place for node in nodes]
    nodes[1].join(Share(1, places, bytes(32)))
    nodes[0].join(Share(0, places, SECRET))
    agent = start(nodes[0].memory, 0, "gathers", bell=True)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "open\n"
    nodes[1].bridge.close()
    nodes[1].join(Share(1, places, SECRET))
    check_gathers(finish([agent, start(nodes[1].memory, 1, "gathers", bell=True)]))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"secret": bytes(32)}, "did not prove the launch secret"),
        ({"facts": b"\0" * 28}, "its exchange differs"),
        ({"receiver": 1}, "its exchange differs"),
        ({"facts": b""}, "its exchange differs"),
    ],
)
def test_a_sender_of_another_group_is_refused(make_nodes: Any, key: Path, change: dict[str, Any], problem: str) -> None:
    nodes = make_nodes(2, 1, 2, joined=False)
    nodes[0].join(Share(0, [node.place for node in nodes], SECRET))
    facts = facts_of(nodes[0], change.get("receiver", 0))
    wanted = {"secret": SECRET, "facts": facts, **change}
    with connected(nodes[0], key) as link, pytest.raises(Exception, match=problem):
        introduce(link, MAGIC, wanted["secret"], wanted["facts"])
    assert nodes[0].bridge.problem == ""


@pytest.mark.parametrize(
    ("update", "problem"),
    [
        ((0, 1, 0), "sent stream 0, which it does not write"),
        ((99, 1, 0), "sent stream 99, which it does not write"),
        ((1, 0, 0), "sent value 0 with 0 bytes for stream 1"),
        ((1, 1, 4), "room for 0 bytes"),
        ((3, 1, 512 * 1024 + 1), "room for 524288 bytes"),
    ],
)
def test_a_wrong_update_ends_the_connection_and_writes_nothing(
    make_nodes: Any, key: Path, update: tuple[int, int, int], problem: str
) -> None:
    nodes = make_nodes(2, 1, 2, joined=False)
    nodes[0].join(Share(0, [node.place for node in nodes], SECRET))
    before = bytes(nodes[0].memory.mapping)
    with connected(nodes[0], key) as link:
        introduce(link, MAGIC, SECRET, facts_of(nodes[0]))
        link.sendall(np.array(update, "<u4").tobytes())
        assert problem in nodes[0].problem()
    assert bytes(nodes[0].memory.mapping) == before


def facts_of(node: NodeExchange, receiver: int = 0) -> bytes:
    """Returns the facts of node 1 for a connection to node ``receiver``."""
    return np.array([1, receiver, *dataclasses.astuple(node.memory.layout)], "<u4").tobytes()


def connected(node: NodeExchange, key: Path) -> socket.socket:
    plain = socket.create_connection((node.place.host, node.place.port), timeout=time_limit(10.0))
    return ClusterKey(str(key)).exchange.wrap_socket(plain)


def test_a_node_that_cannot_be_reached_ends_the_group(make_nodes: Any) -> None:
    [node] = make_nodes(2, 1, 1, joined=False)
    with socket.socket() as absent:
        absent.bind(("127.0.0.1", 0))  # without listen, so the system refuses connections
        port = absent.getsockname()[1]
        node.join(Share(0, [node.place, Place("127.0.0.1", port)], SECRET), unreached_limit_s=0.6)
        problem = node.problem()
    assert f"no connection to node 127.0.0.1:{port} of the same group after" in problem
    assert "refused" in problem
    assert [f"127.0.0.1:{port} of the same group yet" in each for each in node.notes] == [True]


def test_a_node_that_still_prepares_counts_as_reached(make_nodes: Any) -> None:
    nodes = make_nodes(2, 1, 2, joined=False)
    nodes[0].join(Share(0, [node.place for node in nodes], SECRET), unreached_limit_s=0.0)
    for _ in range(3):
        nodes[1].unready.get(timeout=time_limit(20.0))
    assert (nodes[0].bridge.problem, nodes[0].notes) == ("", [])


def test_only_the_time_since_a_node_was_last_reached_counts(make_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt takes 50 s by the clock of the test, and the limit is 60 s."""
    now, outcomes, has_ended = [0.0], [OSError("a short break"), *(exchange_bridge._NotReadyError(),) * 3], []

    def attempt(bridge: ExchangeBridge, number: int) -> socket.socket:
        now[0] += 50.0
        if outcomes:
            raise outcomes.pop()
        has_ended.append(bridge.problem)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(exchange_bridge, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ExchangeBridge, "_try_to_connect", attempt)
    [node] = make_nodes(2, 1, 1, joined=False)
    node.join(Share(0, [node.place, node.place], SECRET), unreached_limit_s=60.0)
    assert "after 100 s: refused" in node.problem()
    assert has_ended == [""]
    assert len(node.notes) == 1


def test_a_node_with_another_exchange_ends_the_group_at_once(make_nodes: Any) -> None:
    nodes = [*make_nodes(2, 1, 1, joined=False), *make_nodes(1, 2, 1, joined=False)]
    for number, node in enumerate(nodes):
        node.join(Share(number, [each.place for each in nodes], SECRET))
    assert "its exchange differs" in nodes[0].problem()
    assert "its exchange differs" in nodes[1].problem()


def test_a_silent_node_is_noticed(make_nodes: Any, key: Path) -> None:
    nodes = make_nodes(2, 1, 2, joined=False)
    nodes[0].join(Share(0, [node.place for node in nodes], SECRET), patience_s=0.3)
    with connected(nodes[0], key) as link:
        introduce(link, MAGIC, SECRET, facts_of(nodes[0]))
        link.sendall(BEAT)
        assert f"node 127.0.0.1:{nodes[1].place.port} of the same group ended: no sign of life" in nodes[0].problem()


def test_a_node_without_new_data_sends_beats(make_nodes: Any) -> None:
    nodes, links = make_nodes(2, 1, 2, joined=False), queue.Queue[socket.socket]()
    nodes[1].bridge = SimpleNamespace(receive=links.put, close=lambda: None)
    nodes[0].join(Share(0, [node.place for node in nodes], SECRET))
    with links.get(timeout=time_limit(20.0)) as link:
        link.settimeout(time_limit(20.0))
        admit(link, MAGIC, SECRET, lambda facts: "")
        assert receive(link, 3 * len(BEAT)) == 3 * BEAT
        nodes[0].bridge.close()
        nodes[0].bridge = None


def test_a_new_connection_replaces_one_without_updates(make_nodes: Any, key: Path) -> None:
    nodes = make_nodes(2, 1, 2, joined=False)
    nodes[0].join(Share(0, [node.place for node in nodes], SECRET))
    with connected(nodes[0], key) as first, connected(nodes[0], key) as second, connected(nodes[0], key) as third:
        introduce(first, MAGIC, SECRET, facts_of(nodes[0]))
        deadline = time.monotonic() + time_limit(20.0)
        while not nodes[0].bridge._senders:  # the node notes a sender after it has replied
            assert time.monotonic() < deadline
            time.sleep(0.01)
        introduce(second, MAGIC, SECRET, facts_of(nodes[0]))
        assert first.recv(1) == b"", "the node closes the connection that was replaced"
        second.sendall(BEAT)
        while not nodes[0].bridge._confirmed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        introduce(third, MAGIC, SECRET, facts_of(nodes[0]))
        assert third.recv(1) == b"", "a connection that carries updates cannot be replaced"
        assert nodes[0].bridge.problem == ""
        second.sendall(np.array([99, 1, 0], "<u4").tobytes())
        assert "sent stream 99" in nodes[0].problem()


@pytest.mark.parametrize("state", ["connecting", "in the TLS handshake"])
def test_close_ends_a_connection_that_is_being_made(
    make_nodes: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    for name in ("CONNECT_TIMEOUT_S", "INTRODUCTION_TIMEOUT_S"):
        monkeypatch.setattr(exchange_bridge, name, 3600.0)
    [node] = make_nodes(2, 1, 1, joined=False)
    with ExitStack() as owned:
        silent = owned.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        if state == "connecting":  # this connection fills the queue, so the system answers no other one
            owned.enter_context(socket.create_connection(silent.getsockname()))
        node.join(Share(0, [node.place, Place(*silent.getsockname())], SECRET))
        if state == "connecting":
            while not node.bridge._links:
                time.sleep(0.01)
        else:
            accepted = owned.enter_context(silent.accept()[0])
            assert accepted.recv(1)
        closer = threading.Thread(target=node.bridge.close, daemon=True)
        closer.start()
        closer.join(time_limit(20.0))
        assert not closer.is_alive()
        node.bridge = None


def test_an_unexpected_error_of_a_thread_ends_the_group(
    make_nodes: Any, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("nobody expects this")

    nodes = make_nodes(2, 1, 2, joined=False)
    places = [node.place for node in nodes]
    nodes[1].join(Share(1, places, SECRET))
    with monkeypatch.context() as patch:
        patch.setattr(ExchangeBridge, "_copy", fail)
        nodes[0].join(Share(0, places, SECRET))
        assert "nobody expects this" in nodes[0].problem()
    nodes[0].bridge.close()
    nodes[1].bridge.close()
    nodes[1].bridge = None
    nodes[0].join(Share(0, places, SECRET))
    with monkeypatch.context() as patch, connected(nodes[0], key) as link:
        patch.setattr(nodes[0].bridge._lines, "publish", fail)
        introduce(link, MAGIC, SECRET, facts_of(nodes[0]))
        link.sendall(np.array([1, 1, 0], "<u4").tobytes())
        assert "nobody expects this" in nodes[0].problem()


def test_a_bridge_that_cannot_start_frees_its_resources(make_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(threading.Thread):
        started: list[threading.Thread] = []  # noqa: RUF012

        def start(self) -> None:
            if self.started:
                raise RuntimeError("can't start new thread")
            self.started.append(self)
            super().start()

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        os.close(descriptor)

    closed: list[int] = []
    monkeypatch.setattr(exchange_bridge, "os", SimpleNamespace(**{**vars(os), "close": close}))
    monkeypatch.setattr(exchange_bridge, "threading", SimpleNamespace(**{**vars(threading), "Thread": Thread}))
    nodes = make_nodes(3, 1, 3, joined=False)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        nodes[0].join(Share(0, [node.place for node in nodes], SECRET))
    assert not Thread.started[0].is_alive()
    assert len(closed) == 1, "the descriptor that reports problems"
