"""Reads and writes one file of converted weights: the arrays, and a header with their places and checksums.

The file begins with ``MAGIC``, then the position, the length and the CRC-32 of the header. The arrays follow, each at a
multiple of ``ALIGNMENT``. The header is JSON at the end of the file, because a writer adds arrays one by one. The
header has a CRC-32 for every ``CHUNK_BYTES`` of each array, so that several threads can read and check one array.

If the system can map the file in huge pages, a reader maps it, and weights in the system's page cache are not copied.
Otherwise the reader copies the file into memory with huge pages, because kernels are slower with small pages. A
complete file never changes: a new file replaces it, and processes that have mapped the old file keep the old contents.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent.kernels.packing import weight_blob
from agent.weights.storage import Array, file_huge_page_bytes, populate
from llm_serving.ipc.alignment import aligned

MAGIC = b"LLSWGT02"
ALIGNMENT = 4096
"""Arrays begin at multiples of this number of bytes."""
CHUNK_BYTES = 16 << 20
"""Bytes of an array that share a checksum."""
WRITE_BYTES = 16 << 20
"""Number of bytes of each write: a multiple of the huge page size, so that the page cache keeps the file in huge pages.
"""
MAX_HEADER_BYTES = 64 << 20
"""Maximum size of the header of a file of converted weights."""
_MAP_BYTES = 16 << 20
"""Number of bytes that a thread reads into memory with one call. It is a multiple of every page size."""
LEAST_HUGE = 0.5
"""Minimum fraction of a mapped file that must be in huge pages. Below it, the file is copied instead."""
HUGE_PAGE_BYTES = 2 << 20
"""Smallest size of a huge page. A smaller file has none."""
_PREFIX = struct.Struct("<8sQQI")
_DTYPES = ("|i1", "|u1", "<u2", "<i2", "<f2", "<i4", "<f4", "<i8", "<u8")


class EntryError(Exception):
    """Raised if a file of the cache cannot be used. The text gives the reason."""


class EntryWriter:
    """Writes arrays to an open, empty file in a thread, while the caller makes the next arrays."""

    def __init__(self, descriptor: int, fingerprint: str) -> None:
        self._descriptor = descriptor
        self._fingerprint = fingerprint
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-cache")
        self._end = aligned(_PREFIX.size, ALIGNMENT)
        self._piece: Array = np.zeros(WRITE_BYTES, np.uint8)
        self._written = 0
        self._described: list[dict[str, Any]] = []
        self._checksums: list[Future[list[int]]] = []

    def add(self, name: str, array: Array) -> None:
        """Begins to write an array and returns immediately. The array must not change before ``finish`` has returned.
        """
        begin, self._end = self._end, aligned(self._end + array.nbytes, ALIGNMENT)
        self._described.append({"name": name, "dtype": array.dtype.str, "shape": array.shape, "begin": begin})
        self._checksums.append(self._pool.submit(self._write, _bytes_of(array), begin))

    def finish(self) -> int:
        """Completes the file and returns its size in bytes. Raises OSError if a part could not be written."""
        for described, checksums in zip(self._described, self._checksums, strict=True):
            described["checksums"] = checksums.result()
        self._write_piece(self._end - self._written)
        header = json.dumps({"fingerprint": self._fingerprint, "arrays": self._described}).encode()
        _write_all(self._descriptor, memoryview(header), self._end)
        prefix = _PREFIX.pack(MAGIC, self._end, len(header), zlib.crc32(header))
        _write_all(self._descriptor, memoryview(prefix), 0)
        return self._end + len(header)

    def close(self) -> None:
        """Ends the writing thread, and drops arrays that it has not written. Call this also after an error."""
        self._pool.shutdown(cancel_futures=True)

    def _write(self, data: Array, begin: int) -> list[int]:
        """Writes the bytes of an array to the file, from position ``begin`` on. Call this in the order of the
        positions.

        Returns the checksum of each chunk.
        """
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, data.size, CHUNK_BYTES)]
        at = 0
        while at < data.size:
            place = begin + at - self._written
            if place == WRITE_BYTES:
                self._write_piece(WRITE_BYTES)
                continue
            count = min(data.size - at, WRITE_BYTES - place)
            self._piece[place : place + count] = data[at : at + count]
            at += count
        return [zlib.crc32(chunk.data) for chunk in chunks]

    def _write_piece(self, num_bytes: int) -> None:
        _write_all(self._descriptor, self._piece[:num_bytes].data, self._written)
        self._written += num_bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A piece of an array: its bytes, their position in the file, and their checksum."""

    data: Array
    position: int
    checksum: int

    def is_correct(self) -> bool:
        return zlib.crc32(self.data.data) == self.checksum


def read_entry(path: Path, fingerprint: str, threads: int) -> dict[str, Array]:
    """Maps or reads the arrays of the file ``path``, and compares the checksums of all bytes.

    The caller may write to the arrays: this does not change the file. Raises EntryError if the file is damaged, or if
    it was made from another checkpoint or with other settings (``fingerprint``). Raises FileNotFoundError if there is
    no file, and OSError if the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        header, end = _read_header(descriptor)
        if header["fingerprint"] != fingerprint:
            raise EntryError("the checkpoint, the settings or the program have changed since it was written")
        with ThreadPoolExecutor(threads) as pool:
            return _read_arrays(descriptor, header["arrays"], end, pool)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EntryError(f"its header is wrong ({type(error).__name__}: {error})") from error
    finally:
        os.close(descriptor)


def _read_arrays(
    descriptor: int, described: list[dict[str, Any]], end: int, pool: ThreadPoolExecutor
) -> dict[str, Array]:
    """Maps or reads all arrays of a file and compares their checksums.

    ``described`` is the list of arrays in the file's header. The arrays are in the first ``end`` bytes of the file.
    """
    for each in described:
        _check_place(each, end)
    arrays = _map_arrays(descriptor, described, end, pool)
    if arrays is None:
        arrays = {str(each["name"]): _allocate(each) for each in described}
        list(pool.map(lambda chunk: _read_all(descriptor, chunk.data.data, chunk.position), _chunks(described, arrays)))
    correct = list(pool.map(_Chunk.is_correct, _chunks(described, arrays)))
    if not all(correct):
        raise EntryError(f"the checksums of {correct.count(False)} of {len(correct)} pieces are wrong")
    return arrays


def _map_arrays(
    descriptor: int, described: list[dict[str, Any]], end: int, pool: ThreadPoolExecutor
) -> dict[str, Array] | None:
    """Maps the file as private memory and returns its arrays by name.

    Returns None if the system does not map at least half of the file in huge pages.
    """
    if end < LEAST_HUGE * HUGE_PAGE_BYTES:
        return None
    before = file_huge_page_bytes()
    memory = mmap.mmap(descriptor, end, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):  # Linux without huge pages refuses this advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    pieces = [raw[at : at + _MAP_BYTES] for at in range(0, end, _MAP_BYTES)]
    if not all(pool.map(lambda piece: populate(piece, write=False), pieces)):
        # Linux is too old, or the disk fails. The caller then copies the file. A disk that fails makes this copy raise
        # OSError.
        return None
    if file_huge_page_bytes() - before < LEAST_HUGE * end:
        return None
    return {str(each["name"]): _view(raw[int(each["begin"]) :], each) for each in described}


def _chunks(described: list[dict[str, Any]], arrays: dict[str, Array]) -> Iterator[_Chunk]:
    for each in described:
        data, begin = _bytes_of(arrays[str(each["name"])]), int(each["begin"])
        for at, checksum in zip(range(0, data.size, CHUNK_BYTES), each["checksums"], strict=True):
            yield _Chunk(data[at : at + CHUNK_BYTES], begin + at, int(checksum))


def _check_place(described: dict[str, Any], end: int) -> None:
    """Raises EntryError if the header describes an array that cannot be in the file. Call it before allocating memory.
    """
    begin, shape = int(described["begin"]), _shape_of(described)
    if described["dtype"] not in _DTYPES or min(shape, default=1) < 0:
        raise EntryError(f"its header states a wrong type or size of the array {described['name']!r}")
    num_bytes = math.prod(shape) * np.dtype(described["dtype"]).itemsize
    if begin < 0 or begin % ALIGNMENT or begin + num_bytes > end:
        raise EntryError(f"the array {described['name']!r} ends behind the file, or begins at a wrong place")
    if len(described["checksums"]) != math.ceil(num_bytes / CHUNK_BYTES):
        raise EntryError(f"its header has {len(described['checksums'])} checksums for {num_bytes} bytes")


def _allocate(described: dict[str, Any]) -> Array:
    """Returns uninitialised memory with the shape and type of an array that the header describes."""
    return _view(weight_blob(math.prod(_shape_of(described)) * np.dtype(described["dtype"]).itemsize), described)


def _view(memory: Array, described: dict[str, Any]) -> Array:
    """Returns the array that the header describes as a view of the first bytes of ``memory``."""
    shape, dtype = _shape_of(described), np.dtype(described["dtype"])
    array: Array = memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return array


def _shape_of(described: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(length) for length in described["shape"])


def _read_header(descriptor: int) -> tuple[dict[str, Any], int]:
    """Returns the header and its position in the file. The arrays are before this position.

    Raises EntryError if the file is damaged or of another version.
    """
    prefix = os.pread(descriptor, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise EntryError(f"it has only {len(prefix)} bytes")
    magic, begin, length, checksum = _PREFIX.unpack(prefix)
    size = os.fstat(descriptor).st_size
    if magic != MAGIC:
        raise EntryError("it is of another version, or no file of converted weights")
    if length > MAX_HEADER_BYTES or size != begin + length:
        raise EntryError(f"it has {size} bytes, and its beginning states {begin + length}")
    text = os.pread(descriptor, length, begin)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise EntryError("the checksum of its header is wrong")
    header: dict[str, Any] = json.loads(text)
    return header, begin


def _bytes_of(array: Array) -> Array:
    """Returns the memory of a contiguous array as bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


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
