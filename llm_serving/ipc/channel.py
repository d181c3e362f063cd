"""Length-prefixed frames over a stream socket: four bytes little-endian, then that many bytes of message.

The length is capped on both ends before anything is allocated.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from llm_serving.errors import ProtocolError

MAX_FRAME_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """The payload with its length in front. Raises ProtocolError over ``MAX_FRAME_BYTES``."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a byte stream into frames. Feed what arrived, take the whole frames out."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._data)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield every whole frame's payload. Raises ProtocolError at a length over the cap."""
        self._data += data
        offset = 0
        try:
            while len(self._data) - offset >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data, offset)
                if length > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame announces {length} bytes; the limit is {MAX_FRAME_BYTES}")
                end = offset + _LENGTH.size + length
                if len(self._data) < end:
                    break
                payload = bytes(self._data[offset + _LENGTH.size : end])
                offset = end
                yield payload
        finally:
            del self._data[:offset]


class Channel:
    """A connected stream socket that sends and receives frames. Owns the socket.

    ``receive`` blocks (up to the socket's timeout); ``send`` may be called from one thread at a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._buffer = FrameBuffer()
        self._ready: list[bytes] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def send(self, payload: bytes) -> None:
        """Send one frame. Raises OSError when the peer is gone."""
        self._socket.sendall(frame(payload))

    def receive(self) -> bytes | None:
        """The next frame's payload, or None when the peer closed between frames.

        Raises ProtocolError for an oversized or torn frame, TimeoutError or OSError from the socket.
        """
        while not self._ready:
            data = self._socket.recv(64 * 1024)
            if not data:
                if self._buffer.pending_bytes:
                    raise ProtocolError(f"the peer closed inside a frame ({self._buffer.pending_bytes} bytes in)")
                return None
            self._ready.extend(self._buffer.feed(data))
        return self._ready.pop(0)

    def receive_available(self) -> list[bytes] | None:
        """Whole frames that are here after one read of a readable socket; None when the peer closed."""
        data = self._socket.recv(64 * 1024)
        if not data:
            return None
        frames = [*self._ready, *self._buffer.feed(data)]
        self._ready.clear()
        return frames

    def close(self) -> None:
        self._socket.close()
