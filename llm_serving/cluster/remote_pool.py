"""Gives the server access to the host blocks of agents on a node, for KV tiers in folders and for sessions.

Blocks have a TLS connection of their own, with the cluster key. So a step, which uses the link, never waits for a
block. The server proves that it knows the secret of the present run of the agents. The node has sent this secret in
``GroupReady``:

    node                                  server
     |<--- introduction -------------------|   ``ipc.introduction``; both must have host blocks of the same sizes
     |<--- READ, count, blocks -------------|
     |---- block, content ... ------------->|   for each block, in order
     |<--- WRITE, count, blocks ------------|
     |<--- content ... ---------------------|   for each block, in order
     |---- block ... ---------------------->|   for each block, as soon as its content is in the host block
     |<--- WEIGHTS, 0 ----------------------|
     |---- state, text -------------------->|   the digest of the node's weights, an error, or PENDING

A request has at most ``max_blocks`` blocks. It needs one round trip, and requests of other threads never wait long for
the connection.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial

from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.host_pool import HostPoolLayout
from llm_serving.ipc.introduction import introduce, receive, receive_into, set_options, shut_down

MAGIC = b"LLMPOOL2"
READ, WRITE, WEIGHTS = range(1, 4)
REQUEST = struct.Struct("<BI")
"""Kind of the request and the count of its host blocks."""
BLOCK = struct.Struct("<I")
"""The number of a host block, in a request and in the reply for this block."""
MAX_REQUEST_BYTES = 16 << 20
"""Maximum bytes of the contents of a request. A request for one block may be larger."""
MAX_REQUEST_BLOCKS = 64
"""Maximum number of blocks in a request.

The server reads no reply while it sends the contents of a WRITE request. With this limit, the replies always fit the
buffers of the connection, so the node never waits to send them.
"""
PENDING, KNOWN, FAILED = range(3)
MAX_TEXT_BYTES = 255
"""Maximum size of the text in a reply to WEIGHTS, in bytes."""
WEIGHTS_REPLY = struct.Struct(f"<B{MAX_TEXT_BYTES}s")
"""Reply to WEIGHTS: the state, and the digest or an error text, filled with zeros at its end."""

TIMEOUT_S = 10.0
"""Seconds without progress of the peer after which the connection counts as broken."""
RETRY_S = 5.0
"""Seconds for which a request is repeated after its connection broke. This time begins again with each block that
arrives.
"""
RETRY_PAUSE_S = 0.1
"""Seconds between two attempts of the same request to a node."""
PAUSE_S = 10.0
"""After requests have failed for ``RETRY_S``, all requests fail immediately for this number of seconds."""
WEIGHTS_POLL_S = 0.2
"""Seconds from the first WEIGHTS request to the second one. Each further pause is twice as long."""
MAX_WEIGHTS_POLL_S = 2.0
"""Maximum seconds between two WEIGHTS requests."""


class RemotePool:
    """The host blocks of the agents of one replica on one node. It is a ``HostPool`` (``ipc.host_pool``).

    ``read`` and ``write`` wait for the node. So the threads of the KV tiers call them, not the engine thread. Any
    thread may call any method.

    If a connection breaks during a write, the write is repeated on a new connection. The node accepts writes only from
    its newest connection. So a late write never changes a block that was reused. If no new connection can be made,
    it is unknown whether the block was written. ``problem`` then has the reason, and ``write`` waits for ``close``.
    """

    def __init__(
        self, node: str, layouts: Sequence[HostPoolLayout], connect: Callable[[], socket.socket], secret: bytes
    ) -> None:
        """``layouts`` has the sizes of each agent's host blocks, in order of rank. ``node`` is the node's name in error
        texts.

        ``connect`` returns a connection to the node and raises OSError. This object then owns the connection.
        """
        self.block_bytes = sum(layout.block_bytes for layout in layouts)
        self.blocks_at_once = max_blocks(self.block_bytes)
        self.problem = ""
        """The reason why the agents must count as lost. Empty while there is none."""
        self._node, self._connect, self._secret = node, connect, secret
        self._facts = describe_layouts(layouts)
        self._expected = ""
        """Digest of the server's weights. Empty before ``expect_weights``."""
        self._has_same_weights: bool | None = None
        """True if the node's weights have the server's digest. None while the node has not replied."""
        self._link: socket.socket | None = None
        self._resume_at = 0.0
        self._last_error = ""
        self._in_use = threading.Lock()
        """Held by the thread whose request uses the connection."""
        self._lock = threading.Lock()
        """Held for short changes of ``_link``, so that ``close`` never waits for a request."""
        self._closed = threading.Event()

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Returns the contents of host blocks, in order. If the node cannot be reached any more, returns the contents
        that have arrived. Returns an empty list if the node has other weights.
        """
        contents: list[bytes] = []
        for start in range(0, len(blocks), self.blocks_at_once):
            if not self.is_usable:
                break
            wanted, found = blocks[start : start + self.blocks_at_once], list[bytes]()
            with self._exclusive():
                is_complete = self._repeat(partial(self._read, wanted, found), found)
            contents += found
            if not is_complete:
                break
        return contents

    def write(self, blocks: Sequence[int], contents: Sequence[bytes | memoryview]) -> int:
        """Replaces the contents of host blocks, in order. Returns the number of leading blocks that were written."""
        count = 0
        for start in range(0, len(blocks), self.blocks_at_once):
            if not self.is_usable:
                break
            end = start + self.blocks_at_once
            written, sent = list[int](), list[int]()
            with self._exclusive():
                attempt = partial(self._write, blocks[start:end], contents[start:end], written, sent)
                is_complete = self._repeat(attempt, written)
                if not is_complete and sent and not self._closed.is_set():
                    self.problem = f"it is not known whether a host block was written: {self._last_error}"
                    self._closed.wait()
            count += len(written)
            if not is_complete:
                break
        return count

    @property
    def is_usable(self) -> bool | None:
        """True if the node's weights have the server's digest. None while the node has not replied.

        False for other weights, after a problem, and after ``close``. Reads and writes then do nothing.
        """
        return False if self.problem or self._closed.is_set() else self._has_same_weights

    def expect_weights(self, digest: str, note: Callable[[str], None]) -> None:
        """Starts a thread that asks the node for the digest of its weights until it replies. Returns immediately.

        The thread calls ``note`` with the result: an empty text if the node has the server's weights, otherwise an
        error text. If the node cannot be reached, the thread first calls ``note`` once with the reason. If no thread
        can be started, this method calls ``note`` with the reason, and may be called again.
        """
        with self._lock:
            if self._expected or self._closed.is_set():
                return
            self._expected = digest
        try:
            threading.Thread(target=self._compare_weights, args=(note,), name="node-weights", daemon=True).start()
        except RuntimeError as error:
            self._expected = ""
            note(f"the weights of node {self._node} are unknown, so its blocks are not used: {error}")

    def close(self) -> None:
        """Ends the connection without waiting. Requests that have not ended fail."""
        with self._lock:
            self._closed.set()
            if self._link is not None:
                shut_down(self._link)
        self._drop_if_unused()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._in_use:
            yield
        if self._closed.is_set():
            self._drop_if_unused()

    def _drop_if_unused(self) -> None:
        if self._in_use.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._in_use.release()

    def _compare_weights(self, note: Callable[[str], None]) -> None:
        """Asks the node for the digest of its weights until the result is known. Runs in a thread of its own."""
        pause_s, is_reported = WEIGHTS_POLL_S, False
        while not self._closed.is_set():
            with self._exclusive():
                problem = self._ask_weights()
            if self._has_same_weights is not None:
                note(problem)
                return
            if problem and not is_reported:
                is_reported = True
                note(problem)
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_WEIGHTS_POLL_S)

    # The caller of the following methods holds ``_in_use``.

    def _ask_weights(self) -> str:
        """Asks the node for the digest of its weights. Returns the problem, or an empty text."""
        replies: list[bytes] = []
        if not self._repeat(partial(self._read_weights, replies), replies):
            reason = f"the weights of node {self._node} are unknown, so its blocks are not used: {self._last_error}"
            return "" if self._closed.is_set() else reason
        state, content = WEIGHTS_REPLY.unpack(replies[0])
        if state == PENDING:
            return ""
        text = content.rstrip(b"\0").decode(errors="replace")
        self._has_same_weights = state == KNOWN and text == self._expected
        if self._has_same_weights:
            return ""
        reason = f"their digest is {text}, the server's is {self._expected}" if state == KNOWN else text
        return f"the weights of node {self._node} differ, so its blocks are not used: {reason}"

    def _repeat(self, attempt: Callable[[socket.socket], None], done: Sized) -> bool:
        """Calls ``attempt`` with a connection, and again with new connections, until it returns.

        ``attempt`` extends ``done`` by each block that is done, and does only the other blocks when it is called again.
        Returns False if it has raised OSError or LLMServingError for ``RETRY_S`` seconds without a further block, or if
        this object is closed.
        """
        until, num_done = 0.0, -1
        while not self._closed.is_set() and time.monotonic() >= self._resume_at:
            try:
                attempt(self._link or self._open())
                return True
            except (OSError, LLMServingError) as error:
                self._last_error = str(error) or repr(error)
                self._drop()
            now = time.monotonic()
            if len(done) > num_done:
                until, num_done = now + RETRY_S, len(done)
            if now >= until:
                self._resume_at = now + PAUSE_S
            self._closed.wait(RETRY_PAUSE_S)
        return False

    def _read(self, blocks: Sequence[int], contents: list[bytes], link: socket.socket) -> None:
        """Reads the ``blocks`` that ``contents`` does not have yet, and appends their contents."""
        rest = blocks[len(contents) :]
        link.sendall(request_for(READ, rest))
        reply = memoryview(bytearray(BLOCK.size + self.block_bytes))
        for block in rest:
            receive_into(link, reply)
            _check_block(reply[: BLOCK.size], block)
            contents.append(bytes(reply[BLOCK.size :]))

    def _write(
        self,
        blocks: Sequence[int],
        contents: Sequence[bytes | memoryview],
        written: list[int],
        sent: list[int],
        link: socket.socket,
    ) -> None:
        """Writes the ``blocks`` that are not in ``written`` yet, and appends each one for which the node has replied.

        ``sent`` is a list that is not empty once the node may have received the content of a block.
        """
        rest = blocks[len(written) :]
        sent[:] = rest
        link.sendall(request_for(WRITE, rest))
        for content in contents[len(written) :]:
            link.sendall(content)
        for block in rest:
            _check_block(receive(link, BLOCK.size), block)
            written.append(block)

    def _read_weights(self, replies: list[bytes], link: socket.socket) -> None:
        link.sendall(REQUEST.pack(WEIGHTS, 0))
        replies.append(receive(link, WEIGHTS_REPLY.size))

    def _open(self) -> socket.socket:
        link = self._connect()
        with self._lock:
            self._link = link
            if self._closed.is_set():
                raise ConnectionError("the agents have ended")
        link.settimeout(TIMEOUT_S)
        set_options(link)
        introduce(link, MAGIC, self._secret, self._facts)
        return link

    def _drop(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()


def max_blocks(block_bytes: int) -> int:
    """Returns the maximum number of blocks of this size that a request may have."""
    return max(1, min(MAX_REQUEST_BLOCKS, MAX_REQUEST_BYTES // block_bytes))


def request_for(kind: int, blocks: Sequence[int]) -> bytes:
    """Returns a READ or WRITE request for ``blocks``, without contents."""
    return REQUEST.pack(kind, len(blocks)) + struct.pack(f"<{len(blocks)}I", *blocks)


def _check_block(reply: bytes | memoryview, block: int) -> None:
    """Raises ProtocolError if the reply is not for ``block``."""
    (found,) = BLOCK.unpack(reply)
    if found != block:
        raise ProtocolError(f"the node replied for block {found} instead of block {block}")


def describe_layouts(layouts: Sequence[HostPoolLayout]) -> bytes:
    """Returns the number of host blocks and the sizes of their parts, as bytes. The bytes must be equal at the server
    and the node.
    """
    return b"".join(struct.pack("<QQQ", each.num_arrays, each.num_blocks, each.part_bytes) for each in layouts)
