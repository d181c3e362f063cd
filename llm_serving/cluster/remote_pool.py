"""Gives the server access to the host blocks of agents on a node, for KV tiers in folders and for sessions.

Blocks have a TLS connection of their own, with the cluster key. So a step, which uses the link, never waits for a
block. The server proves that it knows the secret of the present run of the agents. The node has sent this secret in
``GroupReady``:

    node                                  server
     |<--- introduction -------------------|   ``ipc.introduction``; both must have host blocks of the same sizes
     |<--- READ, block ---------------------|
     |---- content ------------------------>|
     |<--- WRITE, block, content -----------|
     |---- block -------------------------->|   the content is in the host block
     |<--- WEIGHTS, 0 ----------------------|
     |---- state, text -------------------->|   the digest of the node's weights, an error, or PENDING
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.host_pool import HostPoolLayout
from llm_serving.ipc.introduction import introduce, receive, set_options, shut_down

MAGIC = b"LLMPOOL1"
READ, WRITE, WEIGHTS = range(1, 4)
REQUEST = struct.Struct("<BI")
"""Kind of the request and number of the host block."""
WRITTEN = struct.Struct("<I")
"""Reply to WRITE: the number of the host block."""
PENDING, KNOWN, FAILED = range(3)
MAX_TEXT_BYTES = 255
WEIGHTS_REPLY = struct.Struct(f"<B{MAX_TEXT_BYTES}s")
"""Reply to WEIGHTS: the state, and the digest or an error text, filled with zeros at its end."""

TIMEOUT_S = 10.0
"""Seconds without progress of the peer after which the connection counts as broken."""
RETRY_S = 5.0
"""Seconds for which a request is repeated on new connections after the first one broke."""
RETRY_PAUSE_S = 0.1
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
        """``layouts`` has the sizes of each agent's host blocks, in order of rank. ``node`` is its name in error texts.

        ``connect`` returns a connection to the node and raises OSError. This object then owns the connection.
        """
        self.block_bytes = sum(layout.block_bytes for layout in layouts)
        self.problem = ""
        """The reason why the agents must count as lost. Empty while everything works."""
        self._node, self._connect, self._secret = node, connect, secret
        self._facts = describe_layouts(layouts)
        self._expected = ""
        """Digest of the server's weights. Empty before ``expect_weights``."""
        self._has_same_weights: bool | None = None
        """True if the node's weights have the server's digest. None while the node has not replied."""
        self._link: socket.socket | None = None
        self._may_be_sent = False
        """True if bytes of the present request may have reached the node."""
        self._resume_at = 0.0
        self._last_error = ""
        self._in_use = threading.Lock()
        """Held by the thread whose request uses the connection."""
        self._lock = threading.Lock()
        """Held for short changes of ``_link``, so that ``close`` never waits for a request."""
        self._closed = threading.Event()

    def read(self, block: int) -> bytes | None:
        """Returns the content of a host block. Returns None if the node cannot be reached or has other weights."""
        if not self.is_usable:
            return None
        with self._exclusive():
            return self._request((REQUEST.pack(READ, block),), self.block_bytes)

    def write(self, block: int, content: bytes) -> bool:
        """Replaces the content of a host block. Returns False if the content was not written."""
        if not self.is_usable:
            return False
        with self._exclusive():
            self._may_be_sent = False
            if self._request((REQUEST.pack(WRITE, block), content), WRITTEN.size, WRITTEN.pack(block)) is not None:
                return True
            if self._may_be_sent and not self._closed.is_set():
                self.problem = f"it is not known whether a host block was written: {self._last_error}"
                self._closed.wait()
            return False

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
        reply = self._request((REQUEST.pack(WEIGHTS, 0),), WEIGHTS_REPLY.size)
        if reply is None:
            reason = f"the weights of node {self._node} are unknown, so its blocks are not used: {self._last_error}"
            return "" if self._closed.is_set() else reason
        state, content = WEIGHTS_REPLY.unpack(reply)
        if state == PENDING:
            return ""
        text = content.rstrip(b"\0").decode(errors="replace")
        self._has_same_weights = state == KNOWN and text == self._expected
        if self._has_same_weights:
            return ""
        reason = f"their digest is {text}, the server's is {self._expected}" if state == KNOWN else text
        return f"the weights of node {self._node} differ, so its blocks are not used: {reason}"

    def _request(self, parts: Sequence[bytes], num_bytes: int, expected: bytes | None = None) -> bytes | None:
        """Sends a request and returns the reply, which has ``num_bytes`` bytes.

        A broken connection is replaced, and the request is repeated. Returns None after ``RETRY_S`` seconds without
        success, or if this object is closed. If ``expected`` is given, any other reply counts as a broken connection.
        """
        until: float | None = None
        while not self._closed.is_set() and time.monotonic() >= self._resume_at:
            try:
                return self._attempt(parts, num_bytes, expected)
            except (OSError, LLMServingError) as error:
                self._last_error = str(error) or repr(error)
                self._drop()
            now = time.monotonic()
            until = now + RETRY_S if until is None else until
            if now >= until:
                self._resume_at = now + PAUSE_S
            self._closed.wait(RETRY_PAUSE_S)
        return None

    def _attempt(self, parts: Sequence[bytes], num_bytes: int, expected: bytes | None) -> bytes:
        link = self._link or self._open()
        self._may_be_sent = True
        for part in parts:
            link.sendall(part)
        reply = receive(link, num_bytes)
        if expected is not None and reply != expected:
            raise ProtocolError(f"the node replied {reply.hex()} instead of {expected.hex()}")
        return reply

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


def describe_layouts(layouts: Sequence[HostPoolLayout]) -> bytes:
    """Returns the facts about host blocks that the server and the node must agree on."""
    return b"".join(struct.pack("<QQQ", each.num_arrays, each.num_blocks, each.part_bytes) for each in layouts)
