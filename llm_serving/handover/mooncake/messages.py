"""The messages between a node and its process with Mooncake's engine. A packet of their socket has one message."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec

MAX_POOLS = 256
"""Maximum number of hand-over pools of a node."""
MAX_PACKET_BYTES = 64 * 1024
"""Maximum bytes of a packet. A ``Read`` has at most 8 KiB of pairs and 8 KiB of a place, see ``one_sided.py``."""
_PAIR = struct.Struct("<II")
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PoolFile(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a hand-over pool in an inherited file: ``num_blocks`` blocks from byte ``first_byte`` on."""

    descriptor: int
    first_byte: int
    num_blocks: int
    block_bytes: int


class Setup(msgspec.Struct, frozen=True):
    """Node to process, the first message: where Mooncake is reached, and the pools of all agents, in order of rank."""

    host: str
    protocol: str
    device: str
    pools: list[PoolFile]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where another process finds the pools: the address of Mooncake's engine, and the first block of each pool."""

    engine: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
    addresses: Annotated[list[_Address], msgspec.Meta(min_length=1, max_length=MAX_POOLS)]


class Started(msgspec.Struct, frozen=True):
    """Process to node: the engine runs and has registered all pools. If this failed, there is an ``error``."""

    place: Place | None
    error: str = ""


class Read(msgspec.Struct, frozen=True):
    """Node to process: read blocks of the pools at ``place``. A ``Read`` without pairs only asks for a reply.

    The packet also carries the descriptor of a socket. The process sends its reply, one packet, through this socket:
    ``DONE`` if all blocks have been read, otherwise an error text.
    """

    place: bytes
    packed_pairs: bytes

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs (block at ``place``, own block)."""
        return [(source, target) for source, target in _PAIR.iter_unpack(self.packed_pairs)]


DONE = b"done"


def pack_pairs(pairs: Iterable[tuple[int, int]]) -> bytes:
    """Packs pairs (block to read, own block that receives its content) for ``Read.packed_pairs``."""
    return b"".join(_PAIR.pack(*pair) for pair in pairs)


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_started = msgspec.msgpack.Decoder(Started).decode
decode_read = msgspec.msgpack.Decoder(Read).decode
decode_place = msgspec.msgpack.Decoder(Place).decode
