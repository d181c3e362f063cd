"""The format of a session file: a manifest, the tokens, and the KV blocks of the first tokens. This module opens no
file.

    file = magic, u32 size of the manifest, u32 checksum of the manifest, manifest (JSON),
           u32 checksum of the tokens, tokens (int32),
           blocks: each u32 size of the record (not 0), and a record of llm_serving.kvstore.records
           u32 0, u32 number of blocks, u32 checksum of that number and of the manifest

All integers are little-endian. The hash of a block depends on all blocks before it and on the namespace of the
manifest. So the hash in a record shows the position of its block in the conversation. ``SessionReader`` reads a file in
pieces and stores at most one record at a time.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.errors import RequestError
from llm_serving.kvcache.block_hash import TOKEN_BYTES, blake2b_128, root_hash
from llm_serving.kvstore.records import HEADER_BYTES, NAMESPACE_BYTES, decode_content, encode_record

MAGIC = b"LLMSESS1"
MAX_MANIFEST_BYTES = 64 * 1024
"""Maximum size of the manifest of a session file."""
_U32 = struct.Struct("<I")
_PAIR = struct.Struct("<II")


class InvalidSessionError(RequestError):
    """The body is not a session file, or it is damaged or cut off."""

    code = "invalid_session"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description at the start of a session file: its model, its server and the sizes of its parts."""

    model: str
    version: str
    """Version of the server that wrote the file."""
    facts: dict[str, Any]
    """Values that determine the bits of blocks, such as the weights' digest. See ``llm_serving.kvstore.identity``."""
    namespace: bytes
    """Digest of ``facts``."""
    adapter: bytes
    """Digest of the LoRA adapter. Empty without an adapter."""
    block_size: int
    """Number of tokens in a block."""
    num_tokens: int

    def encode(self) -> bytes:
        values = {
            "model": self.model,
            "version": self.version,
            "facts": self.facts,
            "namespace": self.namespace.hex(),
            "adapter": self.adapter.hex(),
            "block_size": self.block_size,
            "num_tokens": self.num_tokens,
        }
        return json.dumps(values, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Returns the manifest of a file. Raises InvalidSessionError."""
        try:
            values = json.loads(data)
            manifest = cls(
                **{name: values[name] for name in ("model", "version", "facts", "block_size", "num_tokens")},
                namespace=bytes.fromhex(values["namespace"]),
                adapter=bytes.fromhex(values["adapter"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidSessionError(f"The manifest of the session file is not valid: {error!r}.") from None
        numbers = (manifest.block_size, manifest.num_tokens)
        is_valid = all(type(number) is int and number > 0 for number in numbers) and isinstance(manifest.facts, dict)
        texts = isinstance(manifest.model, str) and isinstance(manifest.version, str)
        if not (is_valid and texts and len(manifest.namespace) == NAMESPACE_BYTES and len(manifest.adapter) <= 64):
            raise InvalidSessionError("The manifest of the session file has a value of the wrong type or size.")
        return manifest


def chain_of(tokens: bytes, block_size: int, root: bytes, count: int) -> list[BlockKey]:
    """Returns the keys of the first ``count`` blocks of a conversation. ``tokens`` are packed as int32."""
    size, parent, keys = block_size * TOKEN_BYTES, root, list[BlockKey]()
    for start in range(0, count * size, size):
        content = tokens[start : start + size]
        parent = blake2b_128(parent + content)
        keys.append(BlockKey(parent, content))
    return keys


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Returns the number of full blocks with computed keys and values. The keys and values of a session's last token
    are never computed.
    """
    return max(0, num_tokens - 1) // block_size


def encode_head(manifest: Manifest, tokens: bytes) -> bytes:
    """Returns the beginning of a file, up to the tokens."""
    data = manifest.encode()
    return b"".join((MAGIC, _PAIR.pack(len(data), zlib.crc32(data)), data, _U32.pack(zlib.crc32(tokens)), tokens))


def encode_block(manifest: Manifest, key: BlockKey, content: bytes) -> bytes:
    """Returns the part of the file for one block: the size of its record, and the record."""
    record = encode_record(manifest.namespace, key, 0, content)
    return _U32.pack(len(record)) + record


def encode_end(manifest: Manifest, num_blocks: int) -> bytes:
    """Returns the end of a file with ``num_blocks`` blocks."""
    return _U32.pack(0) + _U32.pack(num_blocks) + _U32.pack(_end_checksum(manifest.encode(), num_blocks))


def _end_checksum(manifest: bytes, num_blocks: int) -> int:
    return zlib.crc32(manifest, zlib.crc32(_U32.pack(num_blocks)))


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a session file: its manifest and its tokens."""

    manifest: Manifest
    tokens: bytes


class SessionReader:
    """Reads a session file in pieces. The limits ``max_tokens`` and ``max_block_bytes`` are checked before data is
    stored.

    ``feed`` yields the ``Head``, and then the record of each block as bytes. ``content_of`` checks a record.
    """

    def __init__(self, max_tokens: int, max_block_bytes: int) -> None:
        self._max_tokens = max_tokens
        self._max_block_bytes = max_block_bytes
        self._buffer = bytearray()
        self._parts = self._read()
        self._wanted = next(self._parts)
        self.is_complete = False
        """True if the end of the file has been read."""
        self.num_blocks = 0

    def feed(self, piece: bytes) -> Iterator[Head | bytes]:
        """Yields the head and the records that are complete with the next piece of the file. Raises
        InvalidSessionError.
        """
        self._buffer += piece
        while not self.is_complete and isinstance(self._wanted, int) and len(self._buffer) >= self._wanted:
            data = bytes(self._buffer[: self._wanted])
            del self._buffer[: self._wanted]
            found = self._parts.send(data)
            while not isinstance(found, int):
                yield found
                found = next(self._parts)
            self._wanted = found
        if self.is_complete and self._buffer:
            raise InvalidSessionError("The session file has more bytes after its end.")

    def _read(self) -> Any:
        """A generator that parses the file. It yields the number of bytes that it needs, and the caller sends them.

        In between, it yields each complete part of the file: the ``Head``, then the records.
        """
        magic = yield len(MAGIC)
        if magic != MAGIC:
            raise InvalidSessionError(f"The body is not a session file: it begins with {magic!r} instead of {MAGIC!r}.")
        size, checksum = _PAIR.unpack((yield _PAIR.size))
        if size > MAX_MANIFEST_BYTES:
            raise InvalidSessionError(f"The manifest has {size} bytes; the maximum is {MAX_MANIFEST_BYTES}.")
        data = yield size
        if zlib.crc32(data) != checksum:
            raise InvalidSessionError("The manifest of the session file is damaged: its checksum is wrong.")
        manifest = Manifest.decode(data)
        if manifest.num_tokens > self._max_tokens:
            raise InvalidSessionError(
                f"The session has {manifest.num_tokens} tokens; the longest sequence of this model has "
                f"{self._max_tokens}."
            )
        (checksum,) = _U32.unpack((yield _U32.size))
        tokens = yield manifest.num_tokens * TOKEN_BYTES
        if zlib.crc32(tokens) != checksum:
            raise InvalidSessionError("The tokens of the session file are damaged: their checksum is wrong.")
        yield Head(manifest, tokens)
        most = num_blocks_of(manifest.num_tokens, manifest.block_size)
        limit = self._max_block_bytes + HEADER_BYTES + manifest.block_size * TOKEN_BYTES
        while size := _U32.unpack((yield _U32.size))[0]:
            if size > limit or self.num_blocks == most:
                raise InvalidSessionError(
                    f"Block {self.num_blocks} of the session file has {size} bytes; the session has at most {most} "
                    f"blocks of at most {limit} bytes."
                )
            record = yield size
            self.num_blocks += 1
            yield record
        count, checksum = _PAIR.unpack((yield _PAIR.size))
        if count != self.num_blocks or checksum != _end_checksum(data, count):
            raise InvalidSessionError(f"The session file states {count} blocks and has {self.num_blocks}.")
        self.is_complete = True
        yield 0


def content_of(manifest: Manifest, key: BlockKey, record: bytes) -> bytes:
    """Returns the content of a block. Raises InvalidSessionError if the record is damaged or belongs to another block.
    """
    content = decode_content(record, manifest.namespace, key)
    if content is None:
        raise InvalidSessionError("A block of the session file is damaged, or it is not the block of its place.")
    return content


def file_chain(manifest: Manifest, tokens: bytes, count: int) -> list[BlockKey]:
    """Returns the keys of the first ``count`` blocks in a file. The chain of their hashes begins with the namespace of
    the file, without a salt.
    """
    return chain_of(tokens, manifest.block_size, root_hash(manifest.namespace, b""), count)
