"""Measures the transports that carry KV blocks between machines, over the loopback address. Compares them with a bare
socket.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from queue import Queue
from statistics import median
from typing import Any

import numpy as np

from llm_serving.agent_host.host_blocks import NodeHostBlocks
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.remote_pool import RemotePool
from llm_serving.handover.mooncake.reader import MooncakeReader
from llm_serving.handover.one_sided import OneSidedCarrier
from llm_serving.handover.transport import FRAMES, Array, Carrier, Pool, PoolReceiver, TcpTransport, TransferError
from llm_serving.ipc.hand_over_memory import HandOverLayout, HandOverMemory
from llm_serving.ipc.host_pool import HostPoolLayout, HostPoolMemory
from performance.program import LoadTestError
from performance.terminal import format_table

STORED_HEADER_BYTES = 64
"""Size of the header of a block in the hand-over pool."""
GIGA = 1e9
REQUEST_TIMEOUT_S = 600.0
"""Maximum seconds of one transfer of all blocks, and until the node knows the digest of the weights."""

Results = dict[str, float]


class TransferBenchmarkError(LoadTestError):
    """Raised if the bytes of a received block are wrong, or if a server refuses a request."""


@dataclass(frozen=True, slots=True)
class TransferSizes:
    """The sizes of a transfer."""

    num_arrays: int
    num_blocks: int
    part_bytes: int
    """Number of bytes that a block has in each array."""
    rounds: int

    @property
    def block_bytes(self) -> int:
        return self.num_arrays * self.part_bytes


class _Pool:
    """A hand-over pool in private memory of this process."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.headers: Array = np.zeros((num_blocks, STORED_HEADER_BYTES), np.uint8)
        self.blocks: Array = np.ones((num_blocks, block_bytes), np.uint8)


def alternate(actions: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Runs all actions once in each round, and returns the median seconds of each action.

    The first round is a warm-up and does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: median(times) for name, times in seconds.items()}


def print_rates(kind: str, rates: Mapping[str, float], base: str, heading: str) -> None:
    """Prints a table of rates in GB/s. The last column, below ``heading``, has the ratio of each rate to the rate of
    ``base``.
    """
    rows = [[name, f"{rate:.2f}", f"{rate / rates[base]:.2f}"] for name, rate in rates.items()]
    print(format_table([kind, "GB/s", heading], rows))


def transfer_rates(sizes: TransferSizes, part: str, key: ClusterKey | None) -> Results:
    """Compares a transfer between two pools over the loopback address with a bare socket.

    Both connections use TLS with ``key``, or no TLS if ``key`` is None.
    """
    pools = [_Pool(sizes.num_blocks, sizes.block_bytes) for _ in range(2)]
    rates = _transfer_rates(pools, (FRAMES, FRAMES), sizes.rounds, key)
    name = "socket" if key is None else "tls_socket"
    ratio = rates["TcpTransport"] / rates["bare socket"]
    return {f"{name}_gb_s": rates["bare socket"], f"{part}_gb_s": rates["TcpTransport"], f"{part}_ratio": ratio}


def mooncake_rates(sizes: TransferSizes) -> Results:
    """Compares the rate of a transfer through Mooncake (over TCP) with the rate of a bare socket. Neither uses TLS."""
    layout = HandOverLayout(sizes.num_arrays, sizes.num_blocks, sizes.part_bytes)
    memories = [HandOverMemory.create(layout) for _ in range(2)]
    readers: list[MooncakeReader] = []
    try:
        for memory in memories:
            readers.append(MooncakeReader([memory], "tcp", "", "127.0.0.1"))
        carriers = (OneSidedCarrier(readers[0]), OneSidedCarrier(readers[1]))
        rates = _transfer_rates(memories, carriers, sizes.rounds, None)
    except TransferError as error:
        raise TransferBenchmarkError(str(error)) from error
    finally:
        for each in (*readers, *memories):
            each.close()
    return {"mooncake_gb_s": rates["TcpTransport"], "mooncake_ratio": rates["TcpTransport"] / rates["bare socket"]}


def pool_rates(sizes: TransferSizes, key: ClusterKey) -> Results:
    """Compares reads and writes of a node's host blocks with a bare socket, all with TLS.

    Also measures reads and writes with a separate request for each block. Each request then needs a round trip.
    """
    contents = [np.random.default_rng(block).bytes(sizes.block_bytes) for block in range(sizes.num_blocks)]
    blocks, found = range(sizes.num_blocks), list[bytes]()
    with _node_pool(sizes, key) as pool, closing(_BareSocket(sizes.num_blocks * sizes.block_bytes, key)) as bare:

        def read() -> None:
            found[:] = pool.read(blocks)

        def read_each() -> None:
            found[:] = [content for block in blocks for content in pool.read([block])]

        def write() -> None:
            pool.write(blocks, contents)

        def write_each() -> None:
            for block in blocks:
                pool.write([block], [contents[block]])

        actions = {"bare socket": bare.send, "write": write, "write, one block each": write_each}
        actions |= {"read": read, "read, one block each": read_each}
        seconds = alternate(actions, sizes.rounds)
    if found != contents:
        raise TransferBenchmarkError("the blocks that were read differ from those that were written")
    rates = {name: sizes.num_blocks * sizes.block_bytes / one / GIGA for name, one in seconds.items()}
    print(f"host blocks of a node: {sizes.num_blocks} of {sizes.block_bytes} bytes, loopback address, TLS 1.3")
    print_rates("transfer", rates, "bare socket", "of a bare socket")
    return {
        "pool_write_gb_s": rates["write"],
        "pool_read_gb_s": rates["read"],
        "pool_ratio": min(rates["write"], rates["read"]) / rates["bare socket"],
        "pool_write_gain": rates["write"] / rates["write, one block each"],
        "pool_read_gain": rates["read"] / rates["read, one block each"],
    }


@contextmanager
def _node_pool(sizes: TransferSizes, key: ClusterKey) -> Iterator[RemotePool]:
    """Serves host blocks in this process, and yields the pool through which a server uses them."""
    layout = HostPoolLayout(sizes.num_arrays, sizes.num_blocks, sizes.part_bytes)
    ended: Queue[str] = Queue()

    def connect() -> socket.socket:
        plain = socket.create_connection(listener.getsockname())
        threading.Thread(target=lambda: node.serve(_accepted(listener, key)), daemon=True).start()
        return key.host_blocks.wrap_socket(plain)

    with (
        closing(HostPoolMemory.create(layout)) as memory,
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(NodeHostBlocks([memory], lambda: "digest")) as node,
        closing(RemotePool("node", [layout], connect, node.secret)) as pool,
    ):
        pool.expect_weights("digest", ended.put)
        if problem := ended.get(timeout=REQUEST_TIMEOUT_S):
            raise TransferBenchmarkError(problem)
        yield pool


def _transfer_rates(
    pools: Sequence[Pool], carriers: tuple[Carrier, Carrier], rounds: int, key: ClusterKey | None
) -> dict[str, float]:
    """Sends all blocks of the first pool to the second one, and the same number of bytes through a bare socket.

    ``carriers`` are two objects that move the contents of the blocks. The sender uses the first, the receiver the
    second. Prints and returns both rates in GB/s.
    """
    source, target = pools
    count, block_bytes = source.blocks.shape
    source.blocks[:] = np.random.default_rng(0).integers(0, 256, source.blocks.shape, np.uint8)
    source.headers[:] = 7
    secret, listener = secrets.token_bytes(32), socket.create_server(("127.0.0.1", 0))
    receiver = PoolReceiver([target], secret, carriers[1])
    transport = TcpTransport([source], lambda: _connected(listener.getsockname(), key), secret, carriers[0])
    threading.Thread(target=lambda: receiver.serve(_accepted(listener, key)), daemon=True).start()
    bare = _BareSocket(count * block_bytes, key)
    ended: Queue[Any] = Queue()

    def send() -> None:
        transport.transfer([(block, block) for block in range(count)], ended.put)
        if (problem := ended.get(timeout=REQUEST_TIMEOUT_S)) is not None:
            raise TransferBenchmarkError(str(problem))

    try:
        seconds = alternate({"bare socket": bare.send, "TcpTransport": send}, rounds)
    finally:
        transport.close()
        receiver.close()
        listener.close()
        bare.close()
    if (source.blocks != target.blocks).any() or (source.headers != target.headers).any():
        raise TransferBenchmarkError("the received blocks differ from the sent blocks")
    num_bytes = count * block_bytes
    rates = {name: num_bytes / one / GIGA for name, one in seconds.items()}
    how = (", TLS 1.3" if key is not None else "") + ("" if carriers[0] is FRAMES else ", contents by Mooncake")
    print(f"transfers of {num_bytes / 1e6:.1f} MB over the loopback address{how}")
    print_rates("transfer", rates, "bare socket", "of a bare socket")
    return rates


def _connected(address: Any, key: ClusterKey | None) -> socket.socket:
    plain = socket.create_connection(address)
    return plain if key is None else key.blocks.wrap_socket(plain)


def _accepted(listener: socket.socket, key: ClusterKey | None) -> socket.socket:
    plain, _ = listener.accept()
    return plain if key is None else key.server.wrap_socket(plain, server_side=True)


class _BareSocket:
    """A connection whose other end receives into one buffer, and replies with one byte when the buffer is full."""

    def __init__(self, num_bytes: int, key: ClusterKey | None) -> None:
        self._listener, self._key = socket.create_server(("127.0.0.1", 0)), key
        self._data, self._received = bytes(num_bytes), bytearray(num_bytes)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._sender = _connected(self._listener.getsockname(), key)
        if isinstance(self._sender, ssl.SSLSocket) and self._sender.version() != "TLSv1.3":
            raise TransferBenchmarkError(f"the bare socket uses {self._sender.version()} instead of TLS 1.3")

    def send(self) -> None:
        self._sender.sendall(self._data)
        self._sender.recv(1)

    def close(self) -> None:
        self._sender.close()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with _accepted(self._listener, self._key) as receiver:
            while True:
                view = memoryview(self._received)
                while view.nbytes:
                    count = receiver.recv_into(view)
                    if not count:
                        return
                    view = view[count:]
                receiver.sendall(b"!")
