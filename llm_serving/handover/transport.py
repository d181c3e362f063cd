"""Copies handed blocks from the hand-over pool of one machine to that of another machine.

A block is sent with its stored header and checksum. The transport does not check the content. The agent that reads the
block checks its copy, so damaged or outdated blocks cannot change a text.

``SharedPoolTransport`` is for replicas that share one pool. ``TcpTransport`` sends to a ``PoolReceiver`` on another
machine. It has its own thread and socket, so no step waits for a transfer:

    receiver                              sender
       |---- magic, nonce ------------------->|
       |<--- magic, proof, sizes -------------|   the sizes of the sender's blocks must be those of the receiver's
       |---- magic, or an error text -------->|
       |<--- number, count, destinations -----|   a transfer
       |<--- count x (header, block) ---------|
       |---- number -------------------------->|   all blocks are in the receiver's pool
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.messages import NONCE_BYTES, check_proof, prove

MAGIC = b"LLMHAND1"
TIMEOUT_S = 10.0
"""Seconds without progress of the peer after which the connection counts as lost."""
MAX_CONNECTIONS = 16
_CHALLENGE = struct.Struct(f"<8s{NONCE_BYTES}s")
_HELLO = struct.Struct("<8s32sQQQ")
_REPLY = struct.Struct("<8sI")
_TRANSFER = struct.Struct("<QI")
_ACKNOWLEDGEMENT = struct.Struct("<Q")
_MAX_ERROR_BYTES = 1024
_MAX_PARTS = 512
"""Maximum number of buffers in a call of ``sendmsg``. The limit of the operating system is higher."""

Array = npt.NDArray[Any]
Pairs = Sequence[tuple[int, int]]
"""Pairs (block of the sender's pool, block of the receiver's pool)."""
Done = Callable[[LLMServingError | None], None]
"""Called once at the end of a transfer, from any thread. The error is None if all blocks have arrived."""


class TransferError(LLMServingError):
    """Blocks could not be sent to another machine. Their requests are computed again."""

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


class SharedPoolTransport:
    """The transport between replicas that map the same pool. Nothing must be copied."""

    def transfer(self, pairs: Pairs, done: Done) -> None:
        moved = [pair for pair in pairs if pair[0] != pair[1]]
        done(TransferError(f"a shared pool cannot move blocks: {moved[:4]}") if moved else None)

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    pairs: Pairs
    done: Done


class TcpTransport:
    """Sends blocks of ``pool`` through a connected ``connection`` to a ``PoolReceiver`` with the same ``secret``.

    The socket may be a TLS socket. This object owns the socket, and its thread uses it.
    """

    def __init__(self, pool: Pool, connection: socket.socket, secret: bytes) -> None:
        """Raises ProtocolError if the receiver refuses, and OSError if the connection breaks."""
        self._pool, self._socket = pool, connection
        self._number = 0
        self._waiting: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._is_closed = threading.Event()
        connection.settimeout(TIMEOUT_S)
        _send_promptly(connection)
        self._introduce(secret)
        self._thread = threading.Thread(target=self._run, name="hand-over-sender", daemon=True)
        self._thread.start()

    def transfer(self, pairs: Pairs, done: Done) -> None:
        """See ``BlockTransport.transfer``. Raises ValueError if a source block does not exist."""
        num_blocks = self._pool.blocks.shape[0]
        wrong = [source for source, _ in pairs if not 0 <= source < num_blocks]
        if wrong:
            raise ValueError(f"blocks {wrong[:4]} are not in the pool of {num_blocks} blocks")
        self._waiting.put(_Transfer(list(pairs), done))
        if self._is_closed.is_set():
            self._fail_waiting(TransferError("the transport is closed"))

    def close(self) -> None:
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._waiting.put(None)
        self._thread.join()
        self._socket.close()

    def _introduce(self, secret: bytes) -> None:
        magic, nonce = _CHALLENGE.unpack(_receive(self._socket, _CHALLENGE.size))
        if magic != MAGIC:
            raise ProtocolError(f"the peer begins with {magic!r}; it does not receive handed blocks")
        headers, blocks = self._pool.headers, self._pool.blocks
        proof = prove(secret, "sender", nonce)
        self._socket.sendall(_HELLO.pack(MAGIC, proof, headers.shape[1], blocks.shape[1], blocks.shape[0]))
        magic, length = _REPLY.unpack(_receive(self._socket, _REPLY.size))
        if magic != MAGIC or length > _MAX_ERROR_BYTES:
            raise ProtocolError(f"the receiver replied {magic!r} with {length} bytes")
        if length:
            raise ProtocolError(f"the receiver refused: {_receive(self._socket, length).decode(errors='replace')}")

    def _run(self) -> None:
        problem: LLMServingError | None = None
        while problem is None and (transfer := self._waiting.get()) is not None:
            try:
                self._send(transfer.pairs)
            except (OSError, LLMServingError) as error:
                problem = TransferError(f"the connection to the other machine broke: {error}")
            transfer.done(problem)
        self._is_closed.set()
        self._fail_waiting(problem or TransferError("the transport is closed"))

    def _fail_waiting(self, problem: LLMServingError) -> None:
        while not self._waiting.empty():
            transfer = self._waiting.get()
            if transfer is not None:
                transfer.done(problem)

    def _send(self, pairs: Pairs) -> None:
        self._number += 1
        destinations = np.array([destination for _, destination in pairs], "<u4").tobytes()
        parts = [memoryview(_TRANSFER.pack(self._number, len(pairs)) + destinations)]
        for source, _ in pairs:
            parts += [self._pool.headers[source].data, self._pool.blocks[source].data]
        _send_all(self._socket, parts)
        (number,) = _ACKNOWLEDGEMENT.unpack(_receive(self._socket, _ACKNOWLEDGEMENT.size))
        if number != self._number:
            raise ProtocolError(f"the receiver acknowledged transfer {number} instead of {self._number}")


class PoolReceiver:
    """Receives blocks into ``pool`` from the senders that connect to ``listener`` and know ``secret``.

    Each connection has its own thread. ``close`` ends all threads. With ``context``, connections use TLS.
    """

    def __init__(
        self, pool: Pool, listener: socket.socket, secret: bytes, context: ssl.SSLContext | None = None
    ) -> None:
        self._pool, self._listener, self._secret, self._context = pool, listener, secret, context
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="hand-over-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections and threads, and closes the listening socket."""
        with self._lock:
            self._is_closed = True
            connections = dict(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection, thread in connections.items():
            with contextlib.suppress(OSError):
                # ``SSLSocket.shutdown`` would remove the TLS state that the reading thread uses.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="hand-over-receiver", daemon=True)
            with self._lock:
                is_full = self._is_closed or len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections[connection] = thread
            if is_full:
                connection.close()
            else:
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        link = connection
        try:
            connection.settimeout(TIMEOUT_S)
            _send_promptly(connection)
            if self._context is not None:
                # ``wrap_socket`` moves the descriptor from ``connection`` to the TLS socket. So ``close`` must find the
                # TLS socket.
                tls = link = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                self._note_tls(connection, tls)
                tls.do_handshake()
            self._introduce(link)
            link.settimeout(None)
            while True:
                self._take(link)
        except (OSError, LLMServingError):
            pass  # the sender notices the closed connection, and its requests are computed again
        finally:
            with self._lock:
                self._connections.pop(link, None)
            link.close()

    def _note_tls(self, connection: socket.socket, tls: ssl.SSLSocket) -> None:
        """Replaces a connection by its TLS socket in the table that ``close`` uses. Raises ConnectionError if ``close``
        was called before.
        """
        with self._lock:
            self._connections[tls] = self._connections.pop(connection)
            if self._is_closed:
                raise ConnectionError("the receiver is closed")

    def _introduce(self, link: socket.socket) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        link.sendall(_CHALLENGE.pack(MAGIC, nonce))
        magic, proof, *sizes = _HELLO.unpack(_receive(link, _HELLO.size))
        own = [self._pool.headers.shape[1], self._pool.blocks.shape[1]]
        problem = ""
        if magic != MAGIC:
            raise ProtocolError(f"a sender begins with {magic!r}")
        try:
            check_proof(self._secret, "sender", nonce, proof)
        except ProtocolError as error:
            problem = str(error)
        if not problem and sizes[:2] != own:
            problem = f"its blocks have headers and contents of {sizes[:2]} bytes, those of the receiver have {own}"
        text = problem.encode()[:_MAX_ERROR_BYTES]
        link.sendall(_REPLY.pack(MAGIC, len(text)) + text)
        if problem:
            raise ProtocolError(problem)

    def _take(self, link: socket.socket) -> None:
        """Receives one transfer into the pool. Raises ProtocolError if a destination does not exist."""
        headers, blocks = self._pool.headers, self._pool.blocks
        number, count = _TRANSFER.unpack(_receive(link, _TRANSFER.size))
        if not 1 <= count <= blocks.shape[0]:
            raise ProtocolError(f"a transfer has {count} blocks; the pool has {blocks.shape[0]}")
        destinations = np.frombuffer(_receive(link, 4 * count), "<u4").tolist()
        if max(destinations) >= blocks.shape[0]:
            raise ProtocolError(f"a transfer writes block {max(destinations)}; the pool has {blocks.shape[0]}")
        link.settimeout(TIMEOUT_S)
        for destination in destinations:
            headers[destination] = 0  # no agent may read a block with half of its new content
            header = _receive(link, headers.shape[1])
            _receive_into(link, blocks[destination].data)
            headers[destination] = np.frombuffer(header, np.uint8)
        link.settimeout(None)
        link.sendall(_ACKNOWLEDGEMENT.pack(number))


def _send_promptly(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a socket pair has no TCP options
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_all(link: socket.socket, parts: list[memoryview]) -> None:
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


def _receive(link: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(link, memoryview(data))
    return bytes(data)


def _receive_into(link: socket.socket, view: memoryview) -> None:
    """Fills ``view``. Raises ConnectionError if the peer has closed the connection."""
    while view.nbytes:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]
