"""Copies handed blocks from the hand-over pools of one machine to those of another machine.

A block is sent with its stored header and checksum. The transport does not check the content. The agent that reads the
block checks its copy, so damaged or outdated blocks cannot change a text.

``SharedPoolTransport`` is for replicas that share one pool. ``TcpTransport`` sends to a ``PoolReceiver`` on another
machine. It has its own thread and socket, so no step waits for a transfer:

    receiver                              sender
       |<--- introduction -------------------|   ``ipc.introduction``; both must have blocks of the same sizes
       |<--- number, count, destinations -----|   a transfer
       |<--- count x pools x (header, block) -|   a pool for each agent of a replica
       |---- number -------------------------->|   all blocks are in the receiver's pool

A ``Carrier`` moves the blocks of a transfer. ``FramedCarrier`` sends them through the connection, as above. Another
carrier may move the contents outside the connection, see ``one_sided.py``.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.introduction import introduce, receive, receive_into, set_options, shut_down
from llm_serving.ipc.receiver import Receiver

MAGIC = b"LLMHAND3"
TIMEOUT_S = 10.0
"""Seconds without progress of the peer after which the connection counts as lost."""
MAX_CONNECTIONS = 256
"""Maximum number of connections over which other machines send blocks at the same time."""
IDLE_S = 60.0
"""Seconds without a transfer after which the thread of ``TcpTransport`` ends and its connection is closed."""
_END_WAIT_S = 1.0
"""Seconds that ``TcpTransport.close`` waits for its thread, which may be in the middle of connecting."""
_SIZES = struct.Struct("<QQ")
_TRANSFER = struct.Struct("<QI")
_ACKNOWLEDGEMENT = struct.Struct("<Q")
_MAX_PARTS = 512
"""Maximum number of buffers in a call of ``sendmsg``. The limit of the operating system is higher."""

Array = npt.NDArray[Any]
Pairs = Sequence[tuple[int, int]]
"""Pairs (block of the sender's pool, block of the receiver's pool)."""
Done = Callable[[LLMServingError | None], None]
"""Called once at the end of a transfer, from any thread. The error is None if all blocks have arrived."""
OnCancel = Callable[[Callable[[], None]], None]
"""Called with a function that ends a long call early. Another thread may call that function."""


class TransferError(LLMServingError):
    """Blocks could not be sent to another machine. The requests that need these blocks are computed again."""

    code = "transfer_failed"


class Pool(Protocol):
    """The memory of a hand-over pool, for example ``HandOverMemory``."""

    headers: Array
    """[blocks, bytes of a stored header], uint8, contiguous."""
    blocks: Array
    """[blocks, block_bytes], uint8, contiguous."""


class BlockTransport(Protocol):
    """The interface of a transport, which copies blocks into the pool of the decode replica."""

    def transfer(self, pairs: Pairs, done: Done) -> None:
        """Starts a copy of blocks from the sender's pool to the receiver's pool. Returns immediately.

        Until ``done`` is called, the caller must not change the blocks of either pool.
        """

    def close(self) -> None:
        """Ends the transport. Transfers that have not ended fail."""


class BlockPools(Protocol):
    """The hand-over pools of the replicas, and the transports between them."""

    @property
    def is_shared(self) -> bool:
        """True if all replicas map one pool, which outlives their agents. False if each pool ends with its agents."""

    def transport(self, source: int, target: int) -> BlockTransport:
        """Returns the transport from the pool of one replica to that of another one. The arguments are indices."""


class Carrier(Protocol):
    """Moves the blocks of a transfer from pool to pool. Both ends of a connection need the same carrier.

    Several connections may use a carrier at the same time.
    """

    @property
    def magic(self) -> bytes:
        """The name of the carrier in the introduction of a connection: 8 bytes."""

    def send(self, link: socket.socket, head: bytes, pools: Sequence[Pool], pairs: Pairs) -> None:
        """Sends ``head``, which describes the transfer, and then the blocks.

        Raises OSError or LLMServingError if the blocks did not arrive.
        """

    def take(self, link: socket.socket, pools: Sequence[Pool], destinations: Sequence[int]) -> None:
        """Receives the blocks that ``send`` sends. A block has its header only when its content is complete.

        Raises OSError or LLMServingError.
        """

    def close(self) -> None:
        """Ends the carrier. Calls that have not ended fail."""


class FramedCarrier:
    """Sends headers and blocks through the connection."""

    magic = MAGIC

    def send(self, link: socket.socket, head: bytes, pools: Sequence[Pool], pairs: Pairs) -> None:
        parts = [memoryview(head)]
        for source, _ in pairs:
            for pool in pools:
                parts += [pool.headers[source].data, pool.blocks[source].data]
        send_all(link, parts)

    def take(self, link: socket.socket, pools: Sequence[Pool], destinations: Sequence[int]) -> None:
        for destination in destinations:
            for pool in pools:
                pool.headers[destination] = 0  # no agent may read a block with only a part of its new content
                header = receive(link, pool.headers.shape[1])
                receive_into(link, pool.blocks[destination].data)
                pool.headers[destination] = np.frombuffer(header, np.uint8)

    def close(self) -> None:
        """Does nothing. This carrier has no resources, and its callers close the connections."""


FRAMES = FramedCarrier()


class SharedPoolTransport:
    """The transport between replicas that map the same pool. Nothing must be copied."""

    def transfer(self, pairs: Pairs, done: Done) -> None:
        moved = [pair for pair in pairs if pair[0] != pair[1]]
        done(TransferError(f"a shared pool cannot move blocks: {moved[:4]}") if moved else None)

    def close(self) -> None:
        """Does nothing."""


class SharedPools:
    """The hand-over pool of replicas on one machine. All replicas share one pool."""

    is_shared = True

    def transport(self, source: int, target: int) -> BlockTransport:
        return SharedPoolTransport()


@dataclass(frozen=True, slots=True)
class _Transfer:
    pairs: Pairs
    done: Done


class TcpTransport:
    """Sends blocks of ``pools`` to a ``PoolReceiver`` with the same ``secret`` and the same number of pools.

    A transfer sends the blocks with the same numbers from every pool. If no thread runs, a transfer starts one, which
    calls ``connect``. ``connect`` returns a socket, with or without TLS, which this object then owns. After ``IDLE_S``
    seconds without a transfer, the thread closes the socket and ends. So an unused receiver costs no resources.
    """

    def __init__(
        self, pools: Sequence[Pool], connect: Callable[[], socket.socket], secret: bytes, carrier: Carrier = FRAMES
    ) -> None:
        """``connect`` raises OSError if the other machine cannot be reached. The transfer then fails."""
        self._pools, self._connect, self._secret, self._carrier = pools, connect, secret, carrier
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        """The thread that sends. None while there is nothing to send."""

    @property
    def is_idle(self) -> bool:
        """True if this object has no thread and no connection."""
        return self._thread is None

    @property
    def is_closed(self) -> bool:
        """True after ``close`` and after a failed transfer. Further transfers fail."""
        return self._is_closed.is_set()

    def transfer(self, pairs: Pairs, done: Done) -> None:
        """Starts to send blocks to the receiver's pools. Returns immediately. Raises ValueError for an unknown source.

        ``done`` is called at the end, with an error if not all blocks have arrived.
        """
        num_blocks = self._pools[0].blocks.shape[0]
        wrong = [source for source, _ in pairs if not 0 <= source < num_blocks]
        if wrong:
            raise ValueError(f"blocks {wrong[:4]} are not in the pool of {num_blocks} blocks")
        with self._lock:
            problem = TransferError("the transport is closed") if self._is_closed.is_set() else self._start()
            if problem is None:
                self._waiting.put(_Transfer(list(pairs), done))
        if problem is not None:
            done(problem)

    def stop(self) -> None:
        """Ends the transport without waiting for its thread. Transfers that have not ended fail."""
        with self._lock:
            self._is_closed.set()
            if self._socket is not None:
                shut_down(self._socket)
        self._waiting.put(None)

    def close(self) -> None:
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(_END_WAIT_S)

    def _start(self) -> TransferError | None:
        """Starts the thread if it does not run. Returns an error if the system has no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="hand-over-sender", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                return TransferError(f"the blocks could not be sent to the other machine: {error}")
            self._thread = thread
        return None

    def _run(self) -> None:
        problem: LLMServingError | None = None
        while problem is None:
            try:
                transfer = self._waiting.get(timeout=IDLE_S)
            except Empty:
                if self._ends_idle():
                    return
                continue
            if transfer is None:
                break
            try:
                self._send(self._socket or self._open(), transfer.pairs)
            except (OSError, LLMServingError) as error:
                problem = TransferError(f"the blocks could not be sent to the other machine: {error}")
                self._is_closed.set()
            transfer.done(problem)
        with self._lock:
            self._is_closed.set()
            self._end_thread()
        self._fail_waiting(problem or TransferError("the transport is closed"))

    def _ends_idle(self) -> bool:
        """Closes the connection and returns True if no transfer waits. The next transfer then starts a new thread."""
        with self._lock:
            if not self._waiting.empty():
                return False
            self._end_thread()
            return True

    def _end_thread(self) -> None:
        """Closes the connection of the calling thread, which must then end. The caller holds the lock."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._thread = None

    def _fail_waiting(self, problem: LLMServingError) -> None:
        """Ends all transfers in the queue with an error."""
        with contextlib.suppress(Empty):
            while True:
                transfer = self._waiting.get_nowait()
                if transfer is not None:
                    transfer.done(problem)

    def _open(self) -> socket.socket:
        """Connects to the receiver. Raises ProtocolError if it refuses, and OSError if it cannot be reached."""
        link = self._connect()
        with self._lock:
            self._socket = link
            if self._is_closed.is_set():
                raise ConnectionError("the transport is closed")
        link.settimeout(TIMEOUT_S)
        set_options(link)
        introduce(link, self._carrier.magic, self._secret, _packed(_sizes_of(self._pools)))
        return link

    def _send(self, link: socket.socket, pairs: Pairs) -> None:
        self._number += 1
        destinations = np.array([destination for _, destination in pairs], "<u4").tobytes()
        self._carrier.send(link, _TRANSFER.pack(self._number, len(pairs)) + destinations, self._pools, pairs)
        (number,) = _ACKNOWLEDGEMENT.unpack(receive(link, _ACKNOWLEDGEMENT.size))
        if number != self._number:
            raise ProtocolError(f"the receiver acknowledged transfer {number} instead of {self._number}")


class PoolReceiver(Receiver):
    """Receives blocks into ``pools`` from senders that know ``secret``. A pool has the blocks of one agent.

    If a connection breaks, its sender notices this, and the requests are computed again.
    """

    MAX_CONNECTIONS = MAX_CONNECTIONS
    TIMEOUT_S = TIMEOUT_S

    def __init__(self, pools: Sequence[Pool], secret: bytes, carrier: Carrier = FRAMES) -> None:
        super().__init__(secret)
        self._pools, self._carrier, self.MAGIC = pools, carrier, carrier.magic

    def _problem_of(self, facts: bytes) -> str:
        """Compares the sizes of a sender's blocks with those of this process's pools.

        Returns the difference, or an empty text.
        """
        own = _sizes_of(self._pools)
        if facts == _packed(own):
            return ""
        sizes = list(_SIZES.iter_unpack(facts[: len(facts) // _SIZES.size * _SIZES.size]))
        return f"its blocks have headers and contents of {sizes} bytes, those of the receiver have {own}"

    def _take(self, link: socket.socket) -> None:
        """Receives one transfer into the pools. Raises ProtocolError if a destination does not exist."""
        num_blocks = self._pools[0].blocks.shape[0]
        number, count = _TRANSFER.unpack(receive(link, _TRANSFER.size))
        if not 1 <= count <= num_blocks:
            raise ProtocolError(f"a transfer has {count} blocks; the pool has {num_blocks}")
        destinations = np.frombuffer(receive(link, 4 * count), "<u4").tolist()
        if max(destinations) >= num_blocks:
            raise ProtocolError(f"a transfer writes block {max(destinations)}; the pool has {num_blocks}")
        link.settimeout(TIMEOUT_S)
        self._carrier.take(link, self._pools, destinations)
        link.settimeout(None)
        link.sendall(_ACKNOWLEDGEMENT.pack(number))


def _sizes_of(pools: Sequence[Pool]) -> list[tuple[int, int]]:
    """Returns the bytes of a header and of a block of each pool."""
    return [(pool.headers.shape[1], pool.blocks.shape[1]) for pool in pools]


def _packed(sizes: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(_SIZES.pack(*each) for each in sizes)


def send_all(link: socket.socket, parts: list[memoryview]) -> None:
    """Sends all parts. Without TLS, the parts are not copied in this process."""
    if isinstance(link, ssl.SSLSocket):
        for part in parts:
            link.sendall(part)
        return
    first = 0
    while first < len(parts):
        sent = link.sendmsg(parts[first : first + _MAX_PARTS])
        while first < len(parts) and sent >= parts[first].nbytes:
            sent -= parts[first].nbytes
            first += 1
        if sent:
            parts[first] = parts[first][sent:]
