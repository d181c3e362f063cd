"""The format of a block on disk: a record with a header, the block's tokens and its content.

    record = header, tokens (packed little-endian int32), content (keys and values, for each agent one part)

Integers are little-endian. The header has two checksums: one of the content, and one of the header and the tokens.
Therefore a scan can check headers without reading the contents.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from llm_serving.block_moves.tier_moves import BlockKey

MAGIC = b"LKV1"
NAMESPACE_BYTES = 32
"""Size of the namespace of a block on disk, in bytes."""
HASH_BYTES = 16
"""Size of the chained hash of a block, in bytes."""
MAX_TOKEN_BYTES = 4 * 1024
"""Maximum size of a block's packed tokens, in bytes. No config permits larger blocks."""
MAX_CONTENT_BYTES = 1 << 31
"""Maximum size of the content of a block on disk."""

_HEADER = struct.Struct(f"<4s{NAMESPACE_BYTES}s{HASH_BYTES}sQIQI")
"""Fields: magic, namespace, chained hash, generation, size of the tokens, size of the content (both in bytes), checksum
of the content.
"""
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
"""Size of the header of a record, with its checksum."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record, and the tokens of its block."""

    namespace: bytes
    """Digest of everything on which the content depends, except the tokens (``identity.py``)."""
    key: BlockKey
    generation: int
    """Number of the server run that wrote the record, from 1. In a shared folder, it is the number of the writer
    (``distrust_marks.py``). It is 0 in a session file.
    """
    content_bytes: int
    content_checksum: int

    @property
    def content_start(self) -> int:
        """Offset of the content in the record."""
        return HEADER_BYTES + len(self.key.tokens)

    @property
    def num_bytes(self) -> int:
        """Size of the whole record."""
        return self.content_start + self.content_bytes


def encode_record(namespace: bytes, key: BlockKey, generation: int, content: bytes) -> bytes:
    """Returns the record of a block."""
    header = _HEADER.pack(
        *(MAGIC, namespace, key.chained_hash, generation, len(key.tokens), len(content)),
        zlib.crc32(content),
    )
    checksum = zlib.crc32(key.tokens, zlib.crc32(header))
    return b"".join((header, _CHECKSUM.pack(checksum), key.tokens, content))


def decode_header(data: bytes | memoryview) -> RecordHeader | None:
    """Returns the header at the beginning of ``data``. Returns None if the header is missing, damaged or cut off."""
    if len(data) < HEADER_BYTES:
        return None
    magic, namespace, chained_hash, generation, token_bytes, content_bytes, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or token_bytes > MAX_TOKEN_BYTES or content_bytes > MAX_CONTENT_BYTES:
        return None
    tokens = bytes(data[HEADER_BYTES : HEADER_BYTES + token_bytes])
    (expected,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if len(tokens) < token_bytes or zlib.crc32(tokens, zlib.crc32(data[: _HEADER.size])) != expected:
        return None
    return RecordHeader(namespace, BlockKey(chained_hash, tokens), generation, content_bytes, checksum)


def decode_content(data: bytes, namespace: bytes, key: BlockKey) -> bytes | None:
    """Returns the content of the record ``data``, if this is an undamaged record of the block ``key`` in ``namespace``.

    Returns None otherwise. The caller must then compute the block.
    """
    content = view_content(memoryview(data), namespace, key)
    return None if content is None else bytes(content)


def view_content(data: memoryview, namespace: bytes, key: BlockKey) -> memoryview | None:
    """Like ``decode_content``, but returns the content as a part of ``data``, without a copy."""
    header = decode_header(data)
    if header is None or header.namespace != namespace or header.key != key or header.num_bytes != len(data):
        return None
    content = data[header.content_start :]
    return content if zlib.crc32(content) == header.content_checksum else None


class RecordBuffer:
    """Memory for one record at a time. Reading into new memory would take twice as long, because the operating system
    must first clear it.
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, descriptor: int, num_bytes: int, offset: int = 0) -> memoryview:
        """Returns up to ``num_bytes`` bytes of a file. They are valid until the next call. Raises OSError.

        A network file system may return fewer bytes than a call asks for. Only a call that returns 0 bytes is at the
        end of the file.
        """
        if len(self._data) < num_bytes:
            self._data = bytearray(num_bytes)
        view = memoryview(self._data)[:num_bytes]
        num_read = 0
        while num_read < num_bytes and (num_new := os.preadv(descriptor, [view[num_read:]], offset + num_read)):
            num_read += num_new
        return view[:num_read]
