"""One file of converted weights: the arrays, and a header with their places and checksums.

The file begins with ``MAGIC``, then the position, the length and the CRC-32 of the header. The arrays follow, each at a
multiple of ``ALIGNMENT``. The header is JSON at the end of the file, because a writer adds arrays one by one. It has a
CRC-32 for every ``CHUNK_BYTES`` of each array, so that several threads can read and check.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from agent.kernels.packing import weight_blob
from agent.weights.storage import Array

MAGIC = b"LLSWGT02"
ALIGNMENT = 4096
CHUNK_BYTES = 16 << 20
MAX_HEADER_BYTES = 64 << 20
_PREFIX = struct.Struct("<8sQQI")
_DTYPES = ("|i1", "|u1", "<u2", "<i2", "<f2", "<i4", "<f4", "<i8", "<u8")


class EntryError(Exception):
    """A file cannot be used. The text gives the reason."""


class EntryWriter:
    """Writes arrays to an open, empty file in a thread, while the caller makes the next arrays."""

    def __init__(self, descriptor: int, fingerprint: str) -> None:
        self._descriptor = descriptor
        self._fingerprint = fingerprint
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-cache")
        self._end = _aligned(_PREFIX.size)
        self._described: list[dict[str, Any]] = []
        self._checksums: list[Future[list[int]]] = []

    def add(self, name: str, array: Array) -> None:
        """Writes an array, which must not change before ``finish``."""
        begin, self._end = self._end, _aligned(self._end + array.nbytes)
        self._described.append({"name": name, "dtype": array.dtype.str, "shape": array.shape, "begin": begin})
        self._checksums.append(self._pool.submit(self._write, _bytes_of(array), begin))

    def finish(self) -> int:
        """Completes the file and returns its size in bytes. Raises OSError if a part could not be written."""
        for described, checksums in zip(self._described, self._checksums, strict=True):
            described["checksums"] = checksums.result()
        header = json.dumps({"fingerprint": self._fingerprint, "arrays": self._described}).encode()
        _write_all(self._descriptor, memoryview(header), self._end)
        prefix = _PREFIX.pack(MAGIC, self._end, len(header), zlib.crc32(header))
        _write_all(self._descriptor, memoryview(prefix), 0)
        return self._end + len(header)

    def close(self) -> None:
        """Ends the thread. Parts that have not been written are dropped. Call this method in any case."""
        self._pool.shutdown(cancel_futures=True)

    def _write(self, data: Array, begin: int) -> list[int]:
        checksums = []
        for at in range(0, data.size, CHUNK_BYTES):
            chunk = data[at : at + CHUNK_BYTES].data
            checksums.append(zlib.crc32(chunk))
            _write_all(self._descriptor, chunk, begin + at)
        return checksums


def read_entry(path: Path, fingerprint: str, threads: int) -> dict[str, Array]:
    """Reads the arrays of an entry into new memory and checks all of their bytes.

    Raises EntryError if the file was made of another source or with other settings, or if it is damaged. Raises
    FileNotFoundError if there is no file, and OSError if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        header, end = _read_header(descriptor)
        if header["fingerprint"] != fingerprint:
            raise EntryError("the checkpoint, the settings or the program have changed since it was written")
        return _read_arrays(descriptor, header["arrays"], end, threads)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EntryError(f"its header is wrong ({type(error).__name__}: {error})") from error
    finally:
        os.close(descriptor)


def _read_arrays(descriptor: int, described: list[dict[str, Any]], end: int, threads: int) -> dict[str, Array]:
    """Reads all arrays, which are in the first ``end`` bytes of the file."""
    chunks: list[tuple[memoryview, int, int]] = []
    arrays: dict[str, Array] = {}
    for each in described:
        array, begin = _allocate(each, end), int(each["begin"])
        arrays[str(each["name"])], data = array, _bytes_of(array)
        if len(each["checksums"]) != math.ceil(data.size / CHUNK_BYTES):
            raise EntryError(f"its header has {len(each['checksums'])} checksums for {data.size} bytes")
        places = range(0, data.size, CHUNK_BYTES)
        for at, checksum in zip(places, each["checksums"], strict=True):
            chunks.append((data[at : at + CHUNK_BYTES].data, begin + at, int(checksum)))

    def read(chunk: tuple[memoryview, int, int]) -> bool:
        out, position, checksum = chunk
        _read_all(descriptor, out, position)
        return zlib.crc32(out) == checksum

    with ThreadPoolExecutor(threads) as pool:
        correct = list(pool.map(read, chunks))
    if not all(correct):
        raise EntryError(f"the checksums of {correct.count(False)} of {len(correct)} pieces are wrong")
    return arrays


def _allocate(described: dict[str, Any], end: int) -> Array:
    """Returns uninitialised memory for an array. Raises EntryError, before it allocates, if the file is too short."""
    begin, shape = int(described["begin"]), tuple(int(length) for length in described["shape"])
    if described["dtype"] not in _DTYPES or min(shape, default=1) < 0:
        raise EntryError(f"its header describes the array {described['name']!r} wrongly")
    dtype = np.dtype(described["dtype"])
    num_bytes = math.prod(shape) * dtype.itemsize
    if begin < 0 or begin + num_bytes > end:
        raise EntryError(f"the array {described['name']!r} ends behind the file")
    return weight_blob(num_bytes).view(dtype).reshape(shape)


def _read_header(descriptor: int) -> tuple[dict[str, Any], int]:
    """Returns the header and its position, at which the arrays have ended."""
    prefix = os.pread(descriptor, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise EntryError(f"it has only {len(prefix)} bytes")
    magic, begin, length, checksum = _PREFIX.unpack(prefix)
    size = os.fstat(descriptor).st_size
    if magic != MAGIC:
        raise EntryError("it is of another version, or no file of converted weights")
    if length > MAX_HEADER_BYTES or size != begin + length:
        raise EntryError(f"it has {size} bytes, and its beginning promises {begin + length}")
    text = os.pread(descriptor, length, begin)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise EntryError("the checksum of its header is wrong")
    header: dict[str, Any] = json.loads(text)
    return header, begin


def _bytes_of(array: Array) -> Array:
    """Returns the memory of a contiguous array as bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _read_all(descriptor: int, out: memoryview, position: int) -> None:
    while out.nbytes:
        count = os.preadv(descriptor, [out], position)
        if count == 0:
            raise EntryError("it ends too early")
        out, position = out[count:], position + count


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data.nbytes:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
