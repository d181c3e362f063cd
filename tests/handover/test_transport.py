"""Tests the transports of handed blocks over real sockets, also with TLS, wrong peers and broken connections."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from llm_serving.agent_host.handed_blocks import HandedBlocks
from llm_serving.cluster.key import ClusterKey, make_key
from llm_serving.cluster.messages import BlocksSent, SendBlocks, pack_pairs
from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.handover.one_sided import OneSidedCarrier
from llm_serving.handover.transport import (
    FRAMES,
    Array,
    Carrier,
    Pairs,
    Pool,
    PoolReceiver,
    SharedPoolTransport,
    TcpTransport,
    TransferError,
)
from llm_serving.ipc.hand_over_memory import HandOverLayout
from llm_serving.ipc.messages import NONCE_BYTES, prove
from support.local_reader import LocalReader, Places
from support.time_limits import time_limit

SECRET = bytes(range(32))
BLOCKS, BLOCK_BYTES = 12, 200_000


class SomePool:
    """A hand-over pool whose blocks have random content."""

    def __init__(self, num_blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.headers: Array = rng.integers(0, 256, (num_blocks, 64), np.uint8)
        self.blocks: Array = rng.integers(0, 256, (num_blocks, block_bytes), np.uint8)


class Rig:
    """A receiver with pools, and connections to it. With ``one_sided``, contents travel outside the connections."""

    def __init__(self, key: ClusterKey | None = None, num_pools: int = 1, *, one_sided: bool = False) -> None:
        self._places: Places | None = {} if one_sided else None
        self.pools = [SomePool(seed=1 + number) for number in range(num_pools)]
        self.pool, self.key = self.pools[0], key
        self.receiver = PoolReceiver(self.pools, SECRET, self.carrier(self.pools))
        self._listener = socket.create_server(("127.0.0.1", 0))

    def carrier(self, pools: Sequence[Pool]) -> Carrier:
        return FRAMES if self._places is None else OneSidedCarrier(LocalReader(pools, self._places))

    def sender(self, *pools: Pool, secret: bytes = SECRET) -> TcpTransport:
        return TcpTransport(pools, self.connect, secret, self.carrier(pools))

    def connect(self) -> socket.socket:
        """Returns a connection whose other end the receiver serves in a thread of its own."""
        plain = socket.create_connection(self._listener.getsockname(), timeout=5.0)
        threading.Thread(target=self._serve, args=self._listener.accept(), name="hand-over-receiver").start()
        return plain if self.key is None else self.key.client.wrap_socket(plain)

    def _serve(self, plain: socket.socket, peer: object) -> None:
        self.receiver.serve(plain if self.key is None else self.key.server.wrap_socket(plain, server_side=True))

    def close(self) -> None:
        self._listener.close()
        self.receiver.close()


@pytest.fixture(params=["frames", "one-sided"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(one_sided=request.param == "one-sided")
    yield made
    made.close()
    # A transport forgets its thread just before the thread ends, so ``close`` may not wait for it.
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("hand-over")])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + time_limit(10.0)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def transfer(transport: TcpTransport | SharedPoolTransport, pairs: Pairs) -> LLMServingError | None:
    results: Queue[LLMServingError | None] = Queue()
    transport.transfer(pairs, results.put)
    return results.get(timeout=10.0)


def check_arrived(rig: Rig, source: SomePool, pairs: Pairs) -> None:
    untouched = SomePool(seed=1)
    arrived = {destination: origin for origin, destination in pairs}
    for block in range(BLOCKS):
        expected, number = (source, arrived[block]) if block in arrived else (untouched, block)
        np.testing.assert_array_equal(rig.pool.headers[block], expected.headers[number])
        np.testing.assert_array_equal(rig.pool.blocks[block], expected.blocks[number])


def test_blocks_arrive_with_their_headers(rig: Rig) -> None:
    source = SomePool(seed=2)
    transport = rig.sender(source)
    assert transfer(transport, [(3, 0), (1, 11)]) is None
    assert transfer(transport, [(5, 4)]) is None
    check_arrived(rig, source, [(3, 0), (1, 11), (5, 4)])
    transport.close()
    with pytest.raises(LLMServingError, match="closed"):
        raise transfer(transport, [(3, 0)]) or AssertionError


@pytest.mark.parametrize("one_sided", [False, True])
def test_with_tls(one_sided: bool, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    rig, source = Rig(ClusterKey(str(tmp_path / "key")), one_sided=one_sided), SomePool(seed=2)
    transport = rig.sender(source)
    assert transfer(transport, [(3, 0), (1, 11)]) is None
    check_arrived(rig, source, [(3, 0), (1, 11)])
    closing = threading.Thread(target=rig.close, daemon=True)
    closing.start()
    closing.join(time_limit(5.0))
    assert not closing.is_alive(), "the idle sender delays the end"
    assert isinstance(transfer(transport, [(3, 0)]), TransferError)
    transport.close()


def test_a_peer_without_the_secret_or_with_other_blocks_is_refused(rig: Rig) -> None:
    cases = [
        ([SomePool()], bytes(32), "did not prove the launch secret"),
        ([SomePool(block_bytes=100)], SECRET, "[(64, 100)] bytes, those of the receiver have [(64, 200000)]"),
        ([SomePool(), SomePool()], SECRET, "those of the receiver have [(64, 200000)]"),
    ]
    for pools, secret, phrase in cases:
        transport = rig.sender(*pools, secret=secret)
        assert phrase in str(transfer(transport, [(3, 0)]))
        assert transport.is_closed
        transport.close()
    check_arrived(rig, SomePool(), [])


def test_a_receiver_that_cannot_be_reached_fails_the_transfer() -> None:
    def refuse() -> socket.socket:
        raise ConnectionRefusedError("no one listens")

    transport = TcpTransport([SomePool()], refuse, SECRET)
    assert "no one listens" in str(transfer(transport, [(3, 0)]))
    assert "closed" in str(transfer(transport, [(3, 0)]))
    transport.close()


@pytest.mark.parametrize("one_sided", [False, True])
def test_the_blocks_of_all_agents_travel_together(one_sided: bool) -> None:
    rig, sources = Rig(num_pools=2, one_sided=one_sided), [SomePool(seed=8), SomePool(seed=9)]
    transport = rig.sender(*sources)
    assert transfer(transport, [(3, 0), (1, 11)]) is None
    for source, target in zip(sources, rig.pools, strict=True):
        np.testing.assert_array_equal(target.blocks[[0, 11]], source.blocks[[3, 1]])
        np.testing.assert_array_equal(target.headers[[0, 11]], source.headers[[3, 1]])
    transport.close()
    rig.close()


@pytest.mark.parametrize(
    ("count", "destination"), [(0, 0), (BLOCKS + 1, 0), (1, BLOCKS), (0xFFFFFFFF, 0), (1, 0xFFFFFFFF)]
)
def test_a_transfer_out_of_range_ends_the_connection(rig: Rig, count: int, destination: int) -> None:
    with rig.connect() as link:
        challenge = link.recv(8 + NONCE_BYTES, socket.MSG_WAITALL)
        proof = prove(SECRET, "sender", challenge[8:])
        magic = rig.carrier([SomePool()]).magic
        link.sendall(struct.pack("<8s32sIQQ", magic, proof, 16, 64, BLOCK_BYTES))
        assert link.recv(12, socket.MSG_WAITALL) == magic + bytes(4)
        link.sendall(struct.pack("<QI", 1, count) + struct.pack("<I", destination) * (count == 1))
        assert link.recv(8) == b""
    check_arrived(rig, SomePool(), [])


def test_if_the_connection_breaks_all_waiting_transfers_fail(rig: Rig) -> None:
    source = SomePool(num_blocks=400)
    transport = rig.sender(source)
    assert transfer(transport, [(0, 0)]) is None
    results: Queue[LLMServingError | None] = Queue()
    for _ in range(40):
        transport.transfer([(block, block) for block in range(BLOCKS)], results.put)
    rig.receiver.close()
    ended = [results.get(timeout=10.0) for _ in range(40)]
    assert isinstance(ended[-1], TransferError)
    transport.close()
    assert results.empty()


def test_an_idle_sender_ends_and_a_later_transfer_arrives(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_serving.handover.transport.IDLE_S", 0.01)
    source = SomePool(seed=2)
    transport = rig.sender(source)
    assert transport.is_idle
    assert transfer(transport, [(3, 0)]) is None
    thread = transport._thread
    if thread is not None:  # the thread may have ended already
        thread.join(time_limit(5.0))
        assert not thread.is_alive()
    assert (transport.is_idle, transport.is_closed) == (True, False)
    wait_until(lambda: not rig.receiver._links)
    assert transfer(transport, [(1, 11)]) is None
    check_arrived(rig, source, [(3, 0), (1, 11)])
    transport.close()


def test_a_sender_that_ends_takes_a_transfer_that_comes_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transfer begins when the idle sending thread is about to end. Every transfer must arrive."""
    monkeypatch.setattr("llm_serving.handover.transport.IDLE_S", 0.0)
    source = SomePool(seed=2, block_bytes=100)
    rig.pools[0] = rig.pool = SomePool(seed=1, block_bytes=100)
    rig.receiver = PoolReceiver(rig.pools, SECRET, rig.carrier(rig.pools))
    transport = rig.sender(source)
    assert [transfer(transport, [(1, 2)]) for _ in range(100)] == [None] * 100
    transport.close()


def test_senders_to_nodes_that_never_come_back_do_not_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    layout, key = HandOverLayout(1, 4, 1000), ClusterKey(str(tmp_path / "key"))
    sender, target = HandedBlocks([layout], key), HandedBlocks([layout], key)

    def connect(*_: object) -> socket.socket:
        own, other = socket.socketpair()
        threading.Thread(target=target.receive, args=(other,), name="hand-over-receiver").start()
        return own

    monkeypatch.setattr("llm_serving.handover.transport.IDLE_S", 0.01)
    monkeypatch.setattr("llm_serving.agent_host.handed_blocks.connect_for_blocks", connect)
    for number in range(5):
        sender.send(SendBlocks(number, f"node{number}", 1, target.secret, pack_pairs([(0, 1)])))
        assert select.select([sender.descriptor], [], [], time_limit(5.0))[0]
        assert sender.take_sent() == [BlocksSent(number, "")]
        wait_until(lambda: all(transport.is_idle for _, transport in sender._transports.values()))
    assert len(sender._transports) == 1
    for each in (sender, target):
        each.close()


def test_new_agents_of_a_node_replace_its_idle_sender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    layout, key = HandOverLayout(1, 4, 1000), ClusterKey(str(tmp_path / "key"))
    sender, *targets = [HandedBlocks([layout], key) for _ in range(3)]
    senders = []
    for number, target in enumerate(targets):

        def connect(*_: object, target: HandedBlocks = target) -> socket.socket:
            own, other = socket.socketpair()
            threading.Thread(target=target.receive, args=(other,), name="hand-over-receiver").start()
            return own

        monkeypatch.setattr("llm_serving.agent_host.handed_blocks.connect_for_blocks", connect)
        sender.send(SendBlocks(number, "far", 1, target.secret, pack_pairs([(0, 1)])))
        assert select.select([sender.descriptor], [], [], time_limit(5.0))[0]
        assert sender.take_sent() == [BlocksSent(number, "")]
        [transport] = [one for _, one in sender._transports.values()]
        assert transport._thread is not None
        senders.append(transport._thread)
    senders[0].join(time_limit(5.0))
    assert [thread.is_alive() for thread in senders] == [False, True]
    for each in (sender, *targets):
        each.close()


def test_the_system_checks_an_idle_connection(rig: Rig) -> None:
    transport = rig.sender(SomePool())
    assert transfer(transport, [(0, 0)]) is None
    for link in (*rig.receiver._links, transport._socket):
        assert link is not None
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    transport.close()


def test_an_unfinished_block_has_no_header() -> None:
    rig = Rig()
    with rig.connect() as link:
        challenge = link.recv(8 + NONCE_BYTES, socket.MSG_WAITALL)
        proof = prove(SECRET, "sender", challenge[8:])
        link.sendall(struct.pack("<8s32sIQQ", FRAMES.magic, proof, 16, 64, BLOCK_BYTES))
        link.recv(12, socket.MSG_WAITALL)
        link.sendall(struct.pack("<QII", 1, 1, 5) + bytes(64) + bytes(BLOCK_BYTES // 2))
    rig.close()
    assert not rig.pool.headers[5].any()
    assert rig.pool.headers[4].any()


def test_a_block_that_could_not_be_read_has_no_header_and_the_sender_learns_the_reason() -> None:
    rig, source = Rig(one_sided=True), SomePool(seed=2)
    carrier = rig.carrier([source])
    transport = TcpTransport([source], rig.connect, SECRET, carrier)
    carrier.close()
    assert "the receiver: there are no pools at" in str(transfer(transport, [(3, 0)]))
    assert not rig.pool.headers[0].any()
    assert rig.pool.headers[1].any()
    transport.close()
    rig.close()


def test_a_transfer_in_many_pieces_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_serving.handover.one_sided.PIECE_BYTES", 5 * BLOCK_BYTES)
    rig, source = Rig(one_sided=True), SomePool(seed=2)
    pairs = [(block, BLOCKS - 1 - block) for block in range(BLOCKS)]
    transport = rig.sender(source)
    assert transfer(transport, pairs) is None
    check_arrived(rig, source, pairs)
    transport.close()
    rig.close()


@pytest.mark.parametrize("reply", [(0, 0), (2, 0), (0, 1025)])
def test_a_receiver_that_reports_impossible_progress_fails_the_transfer(reply: tuple[int, int]) -> None:
    own, other = socket.socketpair()
    pool = SomePool()
    other.sendall(struct.pack("<II", *reply))
    with pytest.raises(ProtocolError, match="the receiver read"), own, other:
        OneSidedCarrier(LocalReader([pool], {})).send(own, b"", [pool], [(0, 0)])


@pytest.mark.parametrize("length", [0, 8193, 0xFFFFFFFF])
def test_a_sender_with_an_impossible_place_is_refused(length: int) -> None:
    own, other = socket.socketpair()
    pool = SomePool()
    other.sendall(struct.pack("<I", length))
    with pytest.raises(ProtocolError, match="the place of a sender has"), own, other:
        OneSidedCarrier(LocalReader([pool], {})).take(own, [pool], [0])


def test_a_sender_with_another_carrier_is_refused(rig: Rig) -> None:
    other = Rig(one_sided=rig.carrier([rig.pool]) is FRAMES)
    transport = TcpTransport([SomePool()], rig.connect, SECRET, other.carrier([SomePool()]))
    assert isinstance(transfer(transport, [(3, 0)]), TransferError)
    transport.close()
    other.close()
    check_arrived(rig, SomePool(), [])


def test_an_unknown_source_is_refused(rig: Rig) -> None:
    transport = rig.sender(SomePool())
    with pytest.raises(ValueError, match="not in the pool of 12 blocks"):
        transport.transfer([(BLOCKS, 0)], lambda error: None)
    transport.close()


def test_a_shared_pool_needs_no_transfer() -> None:
    transport = SharedPoolTransport()
    assert transfer(transport, [(3, 3), (4, 4)]) is None
    assert isinstance(transfer(transport, [(3, 4)]), TransferError)
    transport.close()
