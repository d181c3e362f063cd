"""Length-prefixed frames over a stream socket: four little-endian bytes with the length, then the message.

Both ends check the length against a limit before they allocate memory.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from llm_serving.errors import ProtocolError

MAX_FRAME_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")


def frame(payload: bytes, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Returns the frame of ``payload``: its length, then its bytes. Raises ProtocolError above ``max_bytes``."""
    if len(payload) > max_bytes:
        raise ProtocolError(f"a frame of {len(payload)} bytes exceeds the limit of {max_bytes}")
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Splits a byte stream into frames of at most ``max_bytes``."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the payload of each complete frame. Raises ProtocolError for a length above the limit."""
        self._data += data
        offset = 0
        try:
            while len(self._data) - offset >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data, offset)
                if length > self.max_bytes:
                    raise ProtocolError(f"a frame announces {length} bytes; the limit is {self.max_bytes}")
                end = offset + _LENGTH.size + length
                if len(self._data) < end:
                    break
                payload = bytes(self._data[offset + _LENGTH.size : end])
                offset = end
                yield payload
        finally:
            del self._data[:offset]


class Channel:
    """A connected stream socket that sends and receives frames. It owns the socket.

    Only one thread at a time may call ``send``.
    """

    def __init__(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._buffer = FrameBuffer()

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def send(self, payload: bytes) -> None:
        """Sends one frame. Raises OSError if the peer has closed the connection."""
        self._socket.sendall(frame(payload))

    def receive_available(self) -> list[bytes] | None:
        """Reads once from a readable socket and returns the complete frames. None if the peer has closed the socket."""
        data = self._socket.recv(64 * 1024)
        return list(self._buffer.feed(data)) if data else None

    def shut_down(self) -> None:
        """Ends the connection, so that a thread that waits in ``receive_available`` returns. Raises OSError."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
