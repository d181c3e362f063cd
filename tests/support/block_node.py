"""The host blocks of a node in this process, with connections that have no TLS, and small helpers to use them."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable

from llm_serving.agent_host.host_blocks import NodeHostBlocks
from llm_serving.cluster import remote_pool as wire
from llm_serving.cluster.remote_pool import RemotePool
from llm_serving.ipc.host_pool import HostPoolLayout, HostPoolMemory
from llm_serving.ipc.introduction import introduce
from support.time_limits import time_limit

LAYOUT = HostPoolLayout(num_arrays=2, num_blocks=5, part_bytes=300)
DIGEST = "d" * 64


class BlockNode:
    """The host blocks of two agents."""

    def __init__(self, read_weights: Callable[[], str]) -> None:
        self.memories = [HostPoolMemory.create(LAYOUT) for _ in range(2)]
        self.blocks = NodeHostBlocks(self.memories, read_weights)
        self.facts = wire.describe_layouts([LAYOUT] * 2)
        self.threads: list[threading.Thread] = []

    def connect(self) -> socket.socket:
        near, far = socket.socketpair()
        self.threads.append(threading.Thread(target=self.blocks.serve, args=(far,), daemon=True))
        self.threads[-1].start()
        return near

    def admitted(self) -> socket.socket:
        """Returns a connection after its introduction."""
        link = self.connect()
        introduce(link, wire.MAGIC, self.blocks.secret, self.facts)
        return link

    def new_pool(self) -> RemotePool:
        return RemotePool("node", [LAYOUT] * 2, self.connect, self.blocks.secret)

    def close(self) -> None:
        self.blocks.close()
        for memory in self.memories:
            memory.close()
        for thread in self.threads:
            thread.join(time_limit(20))


def content_of(number: int, num_bytes: int) -> bytes:
    return bytes([1 + number]) * num_bytes


def read(pool: RemotePool, block: int) -> bytes | None:
    """Returns the content of one block, or None."""
    found = pool.read([block])
    return found[0] if found else None


def write(pool: RemotePool, block: int, content: bytes) -> bool:
    """Returns whether one block was written."""
    return pool.write([block], [content]) == 1


def compared(pool: RemotePool, digest: str = DIGEST) -> str:
    """Lets a pool compare the node's weights with this digest. Returns the first text that the pool notes."""
    notes: queue.Queue[str] = queue.Queue()
    pool.expect_weights(digest, notes.put)
    return notes.get(timeout=time_limit(20))


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + time_limit(20)
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.005)
