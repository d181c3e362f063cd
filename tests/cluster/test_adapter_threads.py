"""Tests the threads that read and write the cache of a node's adapters. The test decides when a write ends."""

from __future__ import annotations

import hashlib
import selectors
import threading

import pytest

from llm_serving.agent_host import adapters as node_adapters
from llm_serving.agent_host.adapters import NodeAdapters
from llm_serving.cluster import messages as link
from support.executor_steps import shm_entries
from support.small_configs import small_config
from support.time_limits import time_limit

DATA = b"0123456789"
DIGEST = hashlib.sha256(DATA).digest()


class SlowCache:
    """A cache without files, whose writes end when ``may_write`` is set."""

    def __init__(self):
        self.may_write, self.writes = threading.Event(), threading.Semaphore(0)
        self.num_writes = 0

    def fill(self, memory, digest):
        return False

    def keep(self, memory, digest):
        self.num_writes += 1
        self.writes.release()
        assert self.may_write.wait(time_limit(20.0))


class Node:
    """The adapters of a node during one run of agents. It records the messages to the server and to the agents."""

    def __init__(self, folder):
        self.cache, self.asked, self.loaded, self.notes = SlowCache(), [], [], []
        config = small_config(folder, ("lora_config.max_adapters=8", "lora_config.max_rank=512"))
        ways = (self.asked.append, self.loaded.append, None, self.notes.append)
        self.adapters = NodeAdapters(config, self.cache, *ways)

    def take(self, seq):
        """Takes an adapter from the server, from its announcement to the message for the agents."""
        self.adapters.begin(link.LoadAdapter(seq, 0, DIGEST, len(DATA)))
        self.wait()
        self.adapters.receive(link.AdapterPart(seq, 0, DATA))
        assert self.loaded[-1].seq == seq

    def wait(self):
        """Waits for the look-up in the cache."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.adapters.descriptor, selectors.EVENT_READ)
            assert selector.select(time_limit(10.0)), "the look-up waits for a write"
        self.adapters.proceed()

    def join(self):
        """Lets the writes end, and waits for the threads."""
        self.cache.may_write.set()
        for worker in (self.adapters._reader, self.adapters._writer):
            worker.thread.join(time_limit(20.0))
            assert not worker.thread.is_alive()


@pytest.fixture
def node(tmp_path):
    before, node = shm_entries(), Node(tmp_path)
    yield node
    node.join()
    assert shm_entries() == before


def test_a_load_does_not_wait_for_the_write_of_another_adapter(node):
    node.take(1)
    assert node.cache.writes.acquire(timeout=time_limit(10.0))
    node.take(2)
    assert [each.seq for each in node.loaded] == [1, 2]
    node.cache.may_write.set()
    node.adapters.close()


def test_the_end_of_a_run_does_not_wait_for_a_slow_disk(node, monkeypatch):
    monkeypatch.setattr(node_adapters, "CLOSE_WAIT_S", 0.0)
    for seq in (1, 2):
        node.take(seq)
    assert node.cache.writes.acquire(timeout=time_limit(10.0))
    node.adapters.close()
    node.join()
    assert node.cache.num_writes == 1, "the second adapter waited to be written"


def test_a_disk_that_falls_behind_holds_a_limited_number_of_adapters(node):
    node.take(1)
    assert node.cache.writes.acquire(timeout=time_limit(10.0))
    for seq in range(2, node_adapters.MAX_UNWRITTEN + 2):
        node.take(seq)
    assert node.notes == []
    node.take(99)
    assert node.notes == ["an adapter is not kept for later starts: 4 others wait to be written"]
    node.cache.may_write.set()
    for _ in range(node_adapters.MAX_UNWRITTEN):
        assert node.cache.writes.acquire(timeout=time_limit(10.0))
    node.adapters.close()
    assert node.cache.num_writes == node_adapters.MAX_UNWRITTEN + 1


def test_a_look_up_that_ends_after_the_run_leaves_no_memory(node, monkeypatch):
    monkeypatch.setattr(node_adapters, "CLOSE_WAIT_S", 0.0)
    has_begun, create = threading.Event(), node_adapters.AdapterMemory.create_empty

    def create_late(num_bytes):
        has_begun.set()
        assert node.cache.may_write.wait(time_limit(20.0))
        return create(num_bytes)

    monkeypatch.setattr(node_adapters.AdapterMemory, "create_empty", create_late)
    node.adapters.begin(link.LoadAdapter(1, 0, DIGEST, len(DATA)))
    assert has_begun.wait(time_limit(10.0))
    node.adapters.close()
    node.join()
    assert not node.adapters._prepared
