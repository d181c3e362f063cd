"""Tests requests for many host blocks: their order and number, and a node that is lost in the middle of a request."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest

from llm_serving.cluster import remote_pool as wire
from llm_serving.cluster.remote_pool import RemotePool
from llm_serving.ipc.host_pool import pool_of
from llm_serving.ipc.introduction import admit, receive, set_options
from support.block_node import DIGEST, LAYOUT, BlockNode, compared, content_of, wait_for
from support.time_limits import time_limit

ORDER = [3, 0, 4, 1, 2]
TLS_BYTES = 22
"""Bytes that TLS 1.3 adds to a small message: a header of 5 bytes, the kind of the record, and 16 bytes of the tag."""
CONTENTS = [content_of(number, 1200) for number in range(5)]


class CountedNode(BlockNode):
    """A node that records the blocks of each request, and can lose the connection before it reads or writes a block."""

    def __init__(self) -> None:
        super().__init__(lambda: DIGEST)
        self.requests: list[list[int]] = []
        self.num_used = 0
        """Number of blocks that were read or written."""
        self.breaks_before: set[int] = set()
        """Numbers of uses. The connection is lost before each of them, once."""
        self.is_gone = False
        """True if no new connections are possible."""
        receive_numbers, parts = self.blocks._receive_numbers, self.blocks._parts
        self.blocks._receive_numbers = lambda *request: self._note(receive_numbers(*request))
        self.blocks._parts = lambda content: self._use(parts(content))

    def _note(self, blocks):
        self.requests.append(list(blocks))
        return blocks

    def _use(self, parts):
        if self.num_used in self.breaks_before:
            self.breaks_before.remove(self.num_used)
            raise ConnectionResetError("the node has lost the connection")
        self.num_used += 1
        return parts

    def connect(self):
        if self.is_gone:
            raise ConnectionRefusedError("no node")
        return super().connect()


@pytest.fixture
def node():
    made = CountedNode()
    yield made
    made.close()


def usable_pool(node):
    pool = node.new_pool()
    assert compared(pool) == ""
    return pool


def test_many_blocks_need_one_request_and_keep_their_order(node):
    with closing(usable_pool(node)) as pool:
        assert pool.write(ORDER, CONTENTS) == 5
        assert pool.read([2, 2, 0]) == [CONTENTS[4], CONTENTS[4], CONTENTS[1]]
        assert pool.read([]) == []
        assert pool.write([], []) == 0
    assert node.requests == [ORDER, [2, 2, 0]]
    stored = [b"".join(parts) for parts in zip(*(memory.read(ORDER) for memory in node.memories), strict=True)]
    assert stored == CONTENTS


@pytest.mark.parametrize(
    ("name", "limit"), [("MAX_REQUEST_BLOCKS", 2), ("MAX_REQUEST_BYTES", 2 * 1200), ("MAX_REQUEST_BYTES", 3599)]
)
def test_blocks_above_the_limit_of_a_request_need_several_requests(node, monkeypatch, name, limit):
    monkeypatch.setattr(wire, name, limit)
    with closing(usable_pool(node)) as pool:
        assert pool.blocks_at_once == 2
        assert pool.write(ORDER, CONTENTS) == 5
        assert pool.read(ORDER) == CONTENTS
    assert node.requests == 2 * [[3, 0], [4, 1], [2]]


def test_a_block_above_the_limit_of_bytes_has_a_request_of_its_own(node, monkeypatch):
    monkeypatch.setattr(wire, "MAX_REQUEST_BYTES", 1199)
    with closing(usable_pool(node)) as pool:
        assert pool.write(ORDER[:2], CONTENTS[:2]) == 2
        assert pool.read(ORDER[:2]) == CONTENTS[:2]
    assert node.requests == 2 * [[3], [0]]


@pytest.mark.parametrize("place", range(5))
def test_only_the_rest_of_a_broken_request_is_repeated(node, place):
    with closing(usable_pool(node)) as pool:
        node.breaks_before = {place, 5 + place}
        assert pool.write(ORDER, CONTENTS) == 5
        assert pool.read(ORDER) == CONTENTS
    first, repeated, read, read_again = node.requests
    rests = [ORDER[start:] for start in range(place + 1)]  # replies may be lost with a connection
    assert first == read == ORDER
    assert repeated in rests
    assert read_again in rests


def test_a_request_that_breaks_again_and_again_ends_if_blocks_arrive(node, monkeypatch):
    """The time limit of the repetitions begins again with each block."""
    now = [0.0]
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(wire, "RETRY_PAUSE_S", 0.0)
    with closing(usable_pool(node)) as pool:
        assert pool.write(ORDER, CONTENTS) == 5
        node.breaks_before = set(range(6, 10))
        connect = pool._connect

        def connect_later():
            now[0] += 0.9 * wire.RETRY_S
            return connect()

        pool._connect = connect_later
        assert pool.read(ORDER) == CONTENTS
    assert node.requests[1:] == [ORDER[start:] for start in range(5)]


@pytest.mark.parametrize("place", range(5))
def test_a_read_from_a_lost_node_returns_the_blocks_that_arrived(node, monkeypatch, place):
    monkeypatch.setattr(wire, "RETRY_S", 0.05)
    with closing(usable_pool(node)) as pool:
        assert pool.write(ORDER, CONTENTS) == 5
        node.breaks_before, node.is_gone = {5 + place}, True
        assert pool.read([*ORDER, 0]) == CONTENTS[:place]
        assert pool.problem == ""
        assert pool.read(ORDER) == [], "for a while, no request is sent to the lost node"


def test_a_read_of_several_requests_ends_with_the_first_one_that_fails(node, monkeypatch):
    monkeypatch.setattr(wire, "RETRY_S", 0.05)
    monkeypatch.setattr(wire, "MAX_REQUEST_BLOCKS", 2)
    with closing(usable_pool(node)) as pool:
        assert pool.write(ORDER, CONTENTS) == 5
        node.breaks_before, node.is_gone = {8}, True
        assert pool.read(ORDER) == CONTENTS[:3]
    assert node.requests[3:] == [[3, 0], [4, 1]]


def test_no_request_follows_one_that_has_failed(node, monkeypatch):
    """Otherwise, a block would be missing in the middle."""
    monkeypatch.setattr(wire, "MAX_REQUEST_BLOCKS", 2)
    with closing(usable_pool(node)) as pool:
        repeat, attempts = pool._repeat, []

        def fail_once(attempt, done):
            attempts.append(attempt)
            return len(attempts) != 2 and repeat(attempt, done)

        pool._repeat = fail_once
        assert pool.write(ORDER, CONTENTS) == 2
        attempts.clear()
        assert pool.read(ORDER) == CONTENTS[:2]
    assert node.requests == 2 * [ORDER[:2]]


@pytest.mark.parametrize("place", [0, 3])
def test_a_write_to_a_lost_node_returns_after_the_end_of_the_agents(node, monkeypatch, place):
    monkeypatch.setattr(wire, "RETRY_S", 0.05)
    with ThreadPoolExecutor(1) as thread, closing(usable_pool(node)) as pool:
        node.breaks_before, node.is_gone = {place}, True
        written = thread.submit(pool.write, ORDER, CONTENTS)
        wait_for(lambda: pool.problem)
        assert pool.problem == "it is not known whether a host block was written: no node"
        assert not written.done()
        pool.close()
        assert written.result(time_limit(20)) <= place, "replies may be lost with a connection"


def test_a_connection_that_became_old_writes_no_further_block(node):
    with closing(node.admitted()) as old:
        old.sendall(wire.request_for(wire.WRITE, [0, 1]) + content_of(8, 1200))
        assert receive(old, wire.BLOCK.size) == wire.BLOCK.pack(0)
        with closing(usable_pool(node)) as pool:
            assert pool.write([0, 1], CONTENTS[:2]) == 2
            old.sendall(content_of(8, 1200))
            old.settimeout(time_limit(20))
            assert old.recv(1) == b""
            assert pool.read([0, 1]) == CONTENTS[:2]


@pytest.mark.parametrize("kind", [wire.READ, wire.WRITE])
def test_a_reply_for_another_block_breaks_the_connection(monkeypatch, kind):
    """The blocks before it have arrived. The node is then asked for the rest again."""
    ends: list = []
    node = BlockNode(lambda: DIGEST)
    monkeypatch.setattr(wire, "RETRY_S", 0.05)

    def connect():
        if len(ends) == 2:
            raise ConnectionRefusedError("no node")
        near, far = socket.socketpair()
        ends.append(threading.Thread(target=answer, args=(far, len(ends) == 0), daemon=True))
        ends[-1].start()
        return near

    def answer(link, is_first):
        with closing(link):
            admit(link, wire.MAGIC, bytes(32), lambda facts: "")
            if is_first:
                receive(link, wire.REQUEST.size)
                link.sendall(wire.WEIGHTS_REPLY.pack(wire.KNOWN, DIGEST.encode()))
            rest = [0, 1, 2] if is_first else [1, 2]
            receive(link, len(wire.request_for(kind, rest)) + (600 * len(rest) if kind == wire.WRITE else 0))
            content = content_of(4, 600) if kind == wire.READ else b""
            link.sendall(wire.BLOCK.pack(rest[0]) + content + wire.BLOCK.pack(rest[1] + 1) + content)

    with closing(node), closing(RemotePool("node", [LAYOUT], connect, bytes(32))) as pool:
        assert compared(pool) == ""
        if kind == wire.READ:
            assert pool.read([0, 1, 2]) == 2 * [content_of(4, 600)]
            return
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(pool.write, [0, 1, 2], 3 * [bytes(600)])
            wait_for(lambda: pool.problem)
            pool.close()
            assert written.result(time_limit(20)) == 2


def test_the_replies_to_the_largest_write_fit_the_buffers_of_a_connection():
    """The server reads them only after it has sent all contents."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as server:
        node, _ = listener.accept()
        with node:
            for each in (node, server):
                set_options(each)
            node.setblocking(False)
            for _ in range(wire.MAX_REQUEST_BLOCKS):
                assert node.send(bytes(TLS_BYTES + wire.BLOCK.size)) == TLS_BYTES + wire.BLOCK.size


class ShortPool:
    """Some agents' host blocks, of which only ``count`` can be reached."""

    block_bytes, blocks_at_once, is_usable = 4, 8, True

    def __init__(self, count):
        self.count, self.written = count, []

    def read(self, blocks):
        return [bytes(4)] * min(self.count, len(blocks))

    def write(self, blocks, contents):
        self.written += contents[: self.count]
        return min(self.count, len(blocks))


def test_a_block_counts_only_if_all_its_parts_were_read_or_written():
    parts = [ShortPool(3), ShortPool(1), ShortPool(2)]
    pool = pool_of(parts)
    assert pool.read([0, 1, 2]) == [bytes(12)]
    assert pool.write([0, 1, 2], [b"aaaabbbbcccc"] * 3) == 1
    assert [part.written[0] for part in parts] == [b"aaaa", b"bbbb", b"cccc"]
