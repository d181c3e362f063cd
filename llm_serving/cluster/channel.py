"""An encrypted connection (TLS) that carries frames. After the TLS handshake, sending and receiving never block."""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections import deque

from llm_serving.ipc.channel import MAX_FRAME_BYTES, FrameBuffer, frame

_READ_BYTES = 32 * 1024
"""Maximum bytes of one read: two TLS records of 16 KiB.

With a larger maximum, each read would allocate its buffer from the operating system and free it again.
"""
MAX_UNSENT_FRAMES = 4096
"""Maximum number of frames that wait to be sent. If a slow peer lets more frames wait, the peer counts as lost."""


class UnreadFramesError(ConnectionError):
    """A frame was dropped, because the peer reads too slowly. The connection itself is not broken."""


class SecureChannel:
    """Sends and receives frames over a connected TLS socket, which it owns. Only one thread at a time may use it.

    ``send`` never waits. It keeps the frames that the socket does not accept immediately, and ``flush`` sends them
    later.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._socket = sock
        self._buffer = FrameBuffer(MAX_FRAME_BYTES)
        self._max_bytes = MAX_FRAME_BYTES
        self._unsent: deque[bytes] = deque()
        self._early: list[bytes] = []
        """Frames that arrived together with the frame that ``receive_one`` returned last."""
        self.last_received = time.monotonic()
        """The time at which data last arrived from the peer, by ``time.monotonic``."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_host(self) -> str:
        """The IP address of this end of the connection. IPv4 addresses have their usual form, also in IPv6 sockets."""
        host: str = self._socket.getsockname()[0]
        return host.removeprefix("::ffff:")

    def allow(self, num_bytes: int) -> None:
        """Sets the maximum size of frames, in both directions."""
        self._max_bytes = self._buffer.max_bytes = num_bytes

    @property
    def events(self) -> int:
        """The events for which a selector must wait, as a mask of the constants ``EVENT_READ`` and ``EVENT_WRITE``."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, payload: bytes) -> None:
        """Sends one frame, or keeps the frame for ``flush``. Raises OSError if the connection is broken, and its
        subclass UnreadFramesError if the peer does not read.
        """
        if len(self._unsent) >= MAX_UNSENT_FRAMES:
            raise UnreadFramesError(f"the peer has not read the last {len(self._unsent)} frames; more are not kept")
        self._unsent.append(frame(payload, self._max_bytes))
        self.flush()

    def flush(self) -> None:
        """Sends the kept frames until the socket accepts no more. Raises OSError if the connection is broken."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return  # OpenSSL must get the same bytes again, so they stay first in the queue
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def receive_available(self) -> list[bytes] | None:
        """Returns the complete frames that have arrived. Returns None if the peer has closed the connection.

        A call does not always read all data that has arrived. A selector then reports the socket as readable again.

        Raises OSError if the connection is broken, and ProtocolError for a frame above the limit.
        """
        frames, self._early = self._early, []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return frames
            if not data:
                return frames or None  # the next call returns None
            self.last_received = time.monotonic()
            frames += self._buffer.feed(data)
            if not self._socket.pending():  # another read would mostly find nothing, which costs an exception
                return frames

    def receive_one(self, timeout_s: float) -> bytes:
        """Waits for the next frame and returns it. Used in the handshake of a link. Later frames stay for
        ``receive_available``.

        Raises OSError if no frame comes in time or the connection ends, and ProtocolError for a frame above the limit.
        """
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, self.events)
            while (left := deadline - time.monotonic()) > 0:
                selector.modify(self._socket, self.events)
                selector.select(left)
                self.flush()
                frames = self.receive_available()
                if frames is None:
                    raise ConnectionError("the peer closed the connection")
                if frames:
                    self._early = frames[1:]
                    return frames[0]
        raise TimeoutError(f"the peer sent nothing within {timeout_s:g} s")

    def close(self) -> None:
        self._socket.close()

