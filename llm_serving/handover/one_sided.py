"""Moves handed blocks with a library that reads the sender's memory, outside the connection of ``TcpTransport``.

Only contents travel through the library. Headers, which have the checksums of the contents, travel through the
connection, where TLS and the secret protect them. So the agent that reads a block notices if the library has damaged
its content, or if a stranger has written it.

    receiver                              sender
       |<--- place, sources, headers ---------|   where the library finds the sender's pools
       |---- blocks read so far ------------->|   after each piece, or an error text

Only the receiver writes into its pools. So a sender that counts as lost, but still runs, cannot change them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llm_serving.errors import ProtocolError
from llm_serving.handover.transport import Pairs, Pool, TransferError, send_all
from llm_serving.ipc.introduction import receive

PIECE_BYTES = 16 << 20
"""Maximum bytes that the library reads in one call. A larger block is read in a call of its own.

The receiver reports its progress after each call. So the sender's timeout applies to one call, not to the transfer.
"""
MAX_PIECE_BLOCKS = 1024
"""Maximum number of blocks that are read at a time."""
MAX_PLACE_BYTES = 8192
"""Maximum size in bytes of the value that ``BlockReader.place`` returns."""
MAX_ERROR_BYTES = 1024
"""Maximum size of the error that a reader reports."""
_LENGTH = struct.Struct("<I")
_PROGRESS = struct.Struct("<II")
"""A reply of the receiver: the number of blocks that it has read so far, and the length of an error text in bytes. The
length is 0 if there is no error.
"""


class BlockReader(Protocol):
    """A library that reads blocks from the pools of another process into the pools of this process."""

    def place(self) -> bytes:
        """Returns where other processes find the pools of this process, in at most ``MAX_PLACE_BYTES`` bytes.

        Raises TransferError if the library does not work.
        """

    def read(self, place: bytes, pairs: Pairs) -> None:
        """Copies blocks from the pools at ``place``. A pair is (block there, own block).

        Raises TransferError if a block did not arrive. When this method has returned or raised an error, the library no
        longer writes into the pools. Several threads may call this method at the same time.
        """

    def close(self) -> None:
        """Ends the library. Reads that have not ended fail."""


class OneSidedCarrier:
    """Sends and receives the blocks of a transfer with a ``BlockReader``. See ``transport.Carrier``."""

    magic = b"LLMPULL1"

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    def send(self, link: socket.socket, head: bytes, pools: Sequence[Pool], pairs: Pairs) -> None:
        place, sources = self._reader.place(), np.array([source for source, _ in pairs], "<u4")
        parts = [head, _LENGTH.pack(len(place)), place, sources.tobytes()]
        send_all(link, [memoryview(part) for part in (*parts, *(pool.headers[sources].tobytes() for pool in pools))])
        num_read = 0
        while num_read < len(pairs):
            count, num_bytes = _PROGRESS.unpack(receive(link, _PROGRESS.size))
            if num_bytes > MAX_ERROR_BYTES or not (num_bytes or num_read < count <= len(pairs)):
                raise ProtocolError(f"the receiver read {count} of {len(pairs)} blocks, after {num_read}")
            if num_bytes:
                raise TransferError(f"the receiver: {receive(link, num_bytes).decode(errors='replace')}")
            num_read = count

    def take(self, link: socket.socket, pools: Sequence[Pool], destinations: Sequence[int]) -> None:
        (length,) = _LENGTH.unpack(receive(link, _LENGTH.size))
        if not 1 <= length <= MAX_PLACE_BYTES:
            raise ProtocolError(f"the place of a sender has {length} bytes; at most {MAX_PLACE_BYTES} are allowed")
        place, count = receive(link, length), len(destinations)
        sources = np.frombuffer(receive(link, 4 * count), "<u4").tolist()
        headers = [np.frombuffer(receive(link, count * pool.headers.shape[1]), np.uint8) for pool in pools]
        for pool in pools:
            pool.headers[list(destinations)] = 0  # no agent may read a block with only a part of its new content
        piece = _blocks_of_a_piece(pools)
        for begin in range(0, count, piece):
            part = slice(begin, min(begin + piece, count))
            self._read(link, place, list(zip(sources[part], destinations[part], strict=True)))
            for pool, sent in zip(pools, headers, strict=True):
                pool.headers[list(destinations[part])] = sent.reshape(count, -1)[part]
            link.sendall(_PROGRESS.pack(part.stop, 0))

    def close(self) -> None:
        self._reader.close()

    def _read(self, link: socket.socket, place: bytes, pairs: Pairs) -> None:
        """Reads one piece. If this fails, sends the reason to the sender and raises TransferError."""
        try:
            self._reader.read(place, pairs)
        except TransferError as error:
            text = str(error).encode()[:MAX_ERROR_BYTES]
            with contextlib.suppress(OSError):  # the sender may have ended
                link.sendall(_PROGRESS.pack(0, len(text)) + text)
            raise


def _blocks_of_a_piece(pools: Sequence[Pool]) -> int:
    return max(1, min(MAX_PIECE_BLOCKS, PIECE_BYTES // sum(pool.blocks.shape[1] for pool in pools)))
