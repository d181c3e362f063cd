"""Length-prefixed frames over a stream socket: four little-endian bytes with the length, then the message.

Both ends check the length against a limit before they allocate memory.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator

from llm_serving.errors import ProtocolError

MAX_FRAME_BYTES = 256 * 1024
"""Default of the maximum size of a message in a frame, in bytes."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 64 * 1024
"""Bytes that are read at a time from a socket."""


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

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Returns the payload of each complete frame. Iterating raises ProtocolError for a length above the limit."""
        is_first = not self._data and len(data) >= _LENGTH.size
        if is_first and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size <= self.max_bytes:
            return (data[_LENGTH.size :],)  # the usual case, without copies to the buffer and from it
        return self._split(data)

    def _split(self, data: bytes) -> Iterator[bytes]:
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
        data = frame(payload)
        try:
            sent = os.write(self._socket.fileno(), data)  # ``socket.send`` polls first if the socket has a timeout
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._socket.sendall(data[sent:])

    def receive_available(self) -> list[bytes] | None:
        """Reads once from a readable socket and returns the complete frames. None if the peer has closed the socket."""
        try:
            data = os.read(self._socket.fileno(), _READ_BYTES)  # ``socket.recv`` polls first, see ``send``
        except BlockingIOError:
            data = self._socket.recv(_READ_BYTES)
        return list(self._buffer.feed(data)) if data else None

    def shut_down(self) -> None:
        """Ends the connection, so that a thread that waits in ``receive_available`` returns. Raises OSError."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
