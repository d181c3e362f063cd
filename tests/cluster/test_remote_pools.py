"""Tests the server's access to host blocks on nodes: connections, wrong requests, late writes, and lost nodes."""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from llm_serving.agent_host.host_blocks import NodeHostBlocks
from llm_serving.cluster import remote_pool as wire
from llm_serving.cluster.dialling import connect_for_blocks, read_address
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.remote_pool import RemotePool
from llm_serving.errors import CheckpointError, ProtocolError
from llm_serving.executor.base import AgentLost, AgentReady
from llm_serving.ipc.host_pool import pool_of
from llm_serving.ipc.introduction import admit, introduce, receive
from llm_serving.kvstore.identity import weights_digest
from llm_serving.kvstore.setup import KvTiers
from support.block_node import DIGEST, LAYOUT, BlockNode, compared, content_of, read, wait_for, write
from support.executor_steps import events_until
from support.small_configs import small_config
from support.time_limits import time_limit

TIERS = (
    *("kv_tier_config.host_blocks=8", "parallel_config.tensor_parallel=2", "serving_config.agent_restart_limit=5"),
)


@pytest.fixture
def node():
    made = BlockNode(lambda: DIGEST)
    yield made
    made.close()


@pytest.fixture
def remote(node):
    """Provides the server's pool of ``node``."""
    with closing(node.new_pool()) as made:
        assert compared(made) == ""
        yield made


def has_ended(link):
    link.settimeout(time_limit(20))
    try:
        return link.recv(1) == b""
    except ConnectionError:
        return True


def test_a_block_has_the_parts_of_all_agents_in_order_of_rank(node, remote):
    for block in range(LAYOUT.num_blocks):
        content = content_of(2 * block, 600) + content_of(2 * block + 1, 600)
        assert write(remote, block, content)
        assert [memory.read([block]) for memory in node.memories] == [[content[:600]], [content[600:]]]
        assert read(remote, block) == content
    assert remote.block_bytes == 1200


def test_no_block_is_used_before_the_weights_were_compared(node):
    with closing(node.new_pool()) as unchecked, closing(node.new_pool()) as other:
        assert unchecked.is_usable is None
        assert read(unchecked, 0) is None
        assert not write(unchecked, 0, content_of(7, 1200))
        assert compared(other, "e" * 64) == (
            "the weights of node node differ, so its blocks are not used: their digest is "
            f"{DIGEST}, the server's is {'e' * 64}"
        )
        assert other.is_usable is False
        assert read(other, 0) is None
        assert not write(other, 0, content_of(7, 1200))
    assert [memory.read([0]) for memory in node.memories] == [[bytes(600)]] * 2


@pytest.fixture
def slow_node():
    """Provides a node that reads its weights until ``is_read`` is set."""
    is_read = threading.Event()
    node = BlockNode(lambda: is_read.wait(time_limit(60)) and DIGEST)
    node.is_read = is_read
    yield node
    is_read.set()
    node.close()


@pytest.mark.parametrize("is_same", [True, False])
def test_nothing_waits_while_the_node_reads_its_weights(slow_node, is_same):
    """Reads and writes before the node's reply do not take the result away, which is noted once."""
    notes = queue.Queue()
    with closing(slow_node.new_pool()) as pool:
        for _ in range(2):
            pool.expect_weights(DIGEST if is_same else "e" * 64, notes.put)
        wait_for(lambda: slow_node.blocks._reader)
        assert pool.is_usable is None
        assert read(pool, 0) is None
        assert not write(pool, 0, content_of(7, 1200))
        assert notes.empty()
        slow_node.is_read.set()
        assert ("differ" in notes.get(timeout=time_limit(20))) is not is_same
        assert pool.is_usable is is_same
        assert read(pool, 0) == (bytes(1200) if is_same else None)
        assert notes.empty()
    assert pool.is_usable is False


def test_a_node_that_can_be_reached_later_is_used(node, monkeypatch):
    for name, seconds in (("RETRY_S", 0.01), ("RETRY_PAUSE_S", 0.001), ("PAUSE_S", 0.2)):
        monkeypatch.setattr(wire, name, seconds)
    may_connect, notes = threading.Event(), queue.Queue()

    def connect():
        if not may_connect.is_set():
            raise ConnectionRefusedError("no node")
        return node.connect()

    with closing(RemotePool("node", [LAYOUT] * 2, connect, node.blocks.secret)) as pool:
        pool.expect_weights(DIGEST, notes.put)
        assert notes.get(timeout=time_limit(20)).endswith("are unknown, so its blocks are not used: no node")
        assert pool.is_usable is None
        may_connect.set()
        assert notes.get(timeout=time_limit(20)) == ""
        assert read(pool, 0) == bytes(1200)


def tiers_of(folder, *overrides):
    """Returns the KV tiers of a server with this digest, and the list of the problems that they report."""
    problems = []
    tiers = KvTiers(small_config(folder, ("kv_tier_config.host_blocks=8", *overrides)), problems.append)
    tiers._digest = DIGEST
    return tiers, problems


def test_a_node_that_reads_its_weights_keeps_no_other_replica_from_the_ssd(node, slow_node, tmp_path):
    tiers, problems = tiers_of(tmp_path, f"kv_tier_config.ssd_folder={tmp_path / 'ssd'}")
    awake = threading.Event()
    first, second = tiers.new_store(lambda: None), tiers.new_store(awake.set)
    with closing(tiers), closing(node.new_pool()) as pool, closing(slow_node.new_pool()) as slow_pool:
        first.open(pool)
        tiers.agents_ready({})
        wait_for(lambda: first.is_usable and tiers._disk.may_write)
        second.open(slow_pool)
        tiers.agents_ready({})
        wait_for(lambda: tiers._disk.may_write)
        assert tiers.identity().facts["weights"] == DIGEST
        assert not tiers.waits_for_nodes, "the blocks of the first node can be used"
        awake.clear()
        assert not second.is_usable
        slow_node.is_read.set()
        assert awake.wait(time_limit(20))
        assert second.is_usable
    assert problems == []


def test_a_node_that_joins_later_gets_the_known_digest(node, slow_node, tmp_path):
    tiers, problems = tiers_of(tmp_path)
    stores = [tiers.new_store(lambda: None) for _ in range(2)]
    with closing(tiers), closing(node.new_pool()) as pool, closing(slow_node.new_pool()) as slow_pool:
        stores[0].open(slow_pool)
        assert tiers.waits_for_nodes
        stores[1].open(pool)
        tiers.agents_ready({})
        wait_for(lambda: stores[1].is_usable)
        assert not tiers.waits_for_nodes
        stores[1].lose()
        assert tiers.waits_for_nodes
        slow_node.blocks._read_weights, tiers._digest = None, "other"
        slow_node.is_read.set()
        wait_for(lambda: slow_pool.is_usable is not None)
        assert not tiers.waits_for_nodes
    assert problems == []


def test_weights_that_have_changed_are_reported():
    def fail():
        raise CheckpointError("the weights have changed since the start of the server")

    node = BlockNode(fail)
    try:
        with closing(node.new_pool()) as pool:
            assert "blocks are not used: the weights have changed since" in compared(pool)
            assert read(pool, 0) is None
    finally:
        node.close()


def test_an_unexpected_error_of_the_node_is_reported():
    """If it were not, the server would ask forever."""

    def fail():
        raise ValueError("a strange file")

    node = BlockNode(fail)
    try:
        with closing(node.new_pool()) as pool:
            assert "they could not be read: ValueError('a strange file')" in compared(pool)
    finally:
        node.close()


def test_a_thread_that_could_not_start_is_started_later(node, monkeypatch):
    start, failed = threading.Thread.start, []

    def start_later(thread):
        if thread.name == "weights" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    with closing(node.new_pool()) as pool:
        assert compared(pool) == ""
        assert read(pool, 0) == bytes(1200)
    assert failed


@pytest.mark.parametrize(
    "request_bytes",
    [
        wire.REQUEST.pack(9, 0),
        wire.REQUEST.pack(0, 0),
        wire.REQUEST.pack(wire.READ, 0),
        wire.request_for(wire.READ, [0] * (wire.MAX_REQUEST_BLOCKS + 1)),
        wire.REQUEST.pack(wire.WRITE, (1 << 32) - 1),
        wire.request_for(wire.READ, [0, LAYOUT.num_blocks, 1]),
        wire.request_for(wire.WRITE, [0, 1 << 31]) + bytes(2400),
    ],
    ids=[
        *("unknown kind", "kind 0", "no block", "too many blocks", "very many blocks"),
        *("read behind the end", "write behind the end"),
    ],
)
def test_a_wrong_request_ends_its_connection_only(node, remote, request_bytes):
    with closing(node.admitted()) as link:
        link.sendall(request_bytes)
        assert has_ended(link)
    assert write(remote, 1, content_of(3, 1200))
    assert read(remote, 1) == content_of(3, 1200)


def test_a_connection_without_the_secret_or_with_other_sizes_is_refused(node):
    with closing(node.connect()) as link, pytest.raises(ProtocolError, match="refused"):
        introduce(link, wire.MAGIC, bytes(32), node.facts)
    with closing(node.connect()) as link, pytest.raises(ProtocolError, match="the server describes its host blocks as"):
        introduce(link, wire.MAGIC, node.blocks.secret, node.facts[:24])
    wait_for(lambda: not node.blocks._links)
    links = [node.admitted() for _ in range(NodeHostBlocks.MAX_CONNECTIONS)]
    with closing(node.connect()) as one_more:
        assert has_ended(one_more)
    for link in links:
        link.close()


def test_a_late_write_of_an_old_connection_changes_nothing(node):
    with closing(node.admitted()) as old:
        old.sendall(wire.request_for(wire.WRITE, [2]) + content_of(8, 1000))
        with closing(node.new_pool()) as pool:
            assert compared(pool) == ""
            assert write(pool, 2, content_of(4, 1200))
            with suppress(ConnectionError):  # on a slow machine, the node has already closed the connection
                old.sendall(content_of(8, 200))
            assert has_ended(old)
            assert read(pool, 2) == content_of(4, 1200)


class HeldSocket(socket.socket):
    """The node's end of a connection. Its thread is held after it has sent the acceptance."""

    def __init__(self, link):
        super().__init__(fileno=link.detach())
        self.go_on = threading.Event()
        self.num_sent = 0

    def sendall(self, data):
        super().sendall(data)
        self.num_sent += 1
        if self.num_sent == 2:  # the first one is the challenge
            self.go_on.wait(time_limit(60))


def test_a_connection_whose_thread_was_held_is_old_when_another_one_was_accepted_meanwhile(node, remote):
    near, far = socket.socketpair()
    held = HeldSocket(far)
    node.threads.append(threading.Thread(target=node.blocks.serve, args=(held,), daemon=True))
    node.threads[-1].start()
    with closing(near) as old:
        introduce(old, wire.MAGIC, node.blocks.secret, node.facts)
        wait_for(lambda: held.num_sent == 2)
        remote._link.shutdown(socket.SHUT_RDWR)
        assert write(remote, 2, content_of(4, 1200)), "through a new connection"
        old.sendall(wire.request_for(wire.WRITE, [2]) + content_of(8, 1200))
        held.go_on.set()
        assert has_ended(old)
        assert read(remote, 2) == content_of(4, 1200)


def test_a_connection_with_wrong_facts_does_not_replace_the_newest_one(node, remote):
    assert write(remote, 1, content_of(3, 1200))
    newest = remote._link
    for secret, facts in ((node.blocks.secret, node.facts[:24]), (bytes(32), node.facts)):
        with closing(node.connect()) as link, pytest.raises(ProtocolError, match="refused"):
            introduce(link, wire.MAGIC, secret, facts)
    assert write(remote, 1, content_of(4, 1200))
    assert remote._link is newest


def test_a_broken_connection_is_replaced(node, remote):
    assert write(remote, 0, content_of(5, 1200))
    remote._link.shutdown(socket.SHUT_RDWR)
    assert read(remote, 0) == content_of(5, 1200)
    remote._link.shutdown(socket.SHUT_RDWR)
    assert write(remote, 0, content_of(6, 1200))
    assert read(remote, 0) == content_of(6, 1200)


def test_a_write_whose_end_is_unknown_returns_only_after_the_end_of_the_agents(monkeypatch):
    """If it returned, the engine could reuse the host block, and the late write would then change the new content."""
    monkeypatch.setattr(wire, "RETRY_S", 0.05)
    near, far = socket.socketpair()
    links = [near]

    def connect():
        if links:
            return links.pop()
        raise ConnectionRefusedError("no node")

    def answer():
        with closing(far):
            admit(far, wire.MAGIC, bytes(32), lambda facts: "")
            receive(far, wire.REQUEST.size)
            far.sendall(wire.WEIGHTS_REPLY.pack(wire.KNOWN, DIGEST.encode()))
            receive(far, wire.REQUEST.size + wire.BLOCK.size + 600)

    pool = RemotePool("node", [LAYOUT], connect, bytes(32))
    with ThreadPoolExecutor(2) as threads, closing(pool):
        ended = threads.submit(answer)
        assert compared(pool) == ""
        written = threads.submit(pool.write, [0], [bytes(600)])
        wait_for(lambda: pool.problem)
        assert pool.problem == "it is not known whether a host block was written: no node"
        assert not written.done()
        pool.close()
        assert written.result(time_limit(20)) == 0
        ended.result(time_limit(20))


def test_a_write_that_was_never_sent_ends_nothing(monkeypatch):
    monkeypatch.setattr(wire, "RETRY_S", 0.05)

    def connect():
        raise ConnectionRefusedError("no node")

    with closing(RemotePool("node", [LAYOUT], connect, bytes(32))) as pool:
        assert compared(pool).endswith("are unknown, so its blocks are not used: no node")
        pool._has_same_weights, pool._resume_at = True, 0.0
        assert not write(pool, 0, bytes(600))
        assert read(pool, 0) is None
        assert pool.problem == ""


@pytest.fixture
def replica(make_node, make_executor, pool):
    """Provides a real node with two stub agents, and the executor of its replica."""
    node = make_node()
    pool.add(node.address)
    executor = make_executor(*TIERS)
    events_until(executor, AgentReady)
    return node, executor


def result_of(executor, job):
    """Runs ``job`` in another thread. Polls the executor meanwhile, because its node ends the agents without polls."""
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(job)
        poll_until(executor, result.done)
        return result.result()


def poll_until(executor, condition):
    until = time.monotonic() + time_limit(60)
    while not condition():
        assert time.monotonic() < until, "it never happened"
        assert not [event for event in executor.poll(0.05) if isinstance(event, AgentLost)]


def test_blocks_travel_between_real_processes(replica, key, tmp_path):
    node, executor = replica
    blocks = pool_of(executor.host_pools())

    def copy():
        assert compared(blocks, weights_digest(small_config(tmp_path, TIERS))) == ""
        contents = [content_of(number, blocks.block_bytes) for number in range(8)]
        assert blocks.write(range(8), contents) == 8
        assert blocks.read(range(8)) == contents
        address = read_address(node.address)
        link = connect_for_blocks(address, ClusterKey(str(key)).host_blocks)
        with closing(link), pytest.raises(ProtocolError, match="refused"):
            introduce(link, wire.MAGIC, bytes(32), b"")

    result_of(executor, copy)
    blocks.problem = "it is not known whether a host block was written"
    [*_, lost] = events_until(executor, AgentLost)
    assert "not known whether a host block was written" in str(lost)
    assert read(blocks, 0) is None
    assert list(executor.host_pools()) != [blocks]


def test_a_node_that_is_killed_ends_its_writes(replica, tmp_path):
    node, executor = replica
    blocks = pool_of(executor.host_pools())
    assert result_of(executor, lambda: compared(blocks, weights_digest(small_config(tmp_path, TIERS)))) == ""
    written = []

    def write_until_lost():
        while write(blocks, len(written) % 8, content_of(len(written) % 200, blocks.block_bytes)):
            written.append(True)

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(write_until_lost)
        poll_until(executor, lambda: len(written) > 20)
        node.send_signal(signal.SIGKILL)
        events_until(executor, AgentLost)
        ended.result(time_limit(20))
    assert read(blocks, 0) is None
