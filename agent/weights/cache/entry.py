"""One file of converted weights: a header with sizes and checksums, then the arrays.

The file begins with ``MAGIC``, the length of the header in bytes (uint64), the CRC-32 of the header (uint32), and the
header as JSON. The arrays follow, each at a multiple of ``ALIGNMENT``. The header has a CRC-32 for every
``CHUNK_BYTES`` of the arrays' part of the file, so that several threads can read, write and check.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from agent.kernels.packing import weight_blob
from agent.weights.storage import Array

MAGIC = b"LLSWGT01"
ALIGNMENT = 4096
CHUNK_BYTES = 16 << 20
MAX_HEADER_BYTES = 64 << 20
_PREFIX = struct.Struct("<8sQI")
_DTYPES = ("|i1", "|u1", "<u2", "<i2", "<f2", "<i4", "<f4", "<i8", "<u8")


class EntryError(Exception):
    """A file cannot be used. The text gives the reason."""


def entry_bytes(arrays: Mapping[str, Array]) -> int:
    """Returns the size of the arrays' part of an entry's file, in bytes."""
    return _places(arrays)[1]


def write_entry(descriptor: int, fingerprint: str, arrays: Mapping[str, Array], threads: int) -> int:
    """Writes ``arrays`` to an open, empty file. Returns the size of the file. Raises OSError."""
    places, data_bytes = _places(arrays)
    names, pieces = list(arrays), _pieces(places)
    flat = {name: _bytes_of(arrays[name]) for name in names}
    checksums = [0] * math.ceil(data_bytes / CHUNK_BYTES)
    described = [
        {"name": name, "dtype": arrays[name].dtype.str, "shape": arrays[name].shape, "begin": begin}
        for name, (begin, _) in places.items()
    ]
    # The length of the header must be known before the checksums are, so their text has a fixed length.
    empty = _header(fingerprint, data_bytes, described, checksums)
    start = _aligned(_PREFIX.size + len(empty))

    def write(chunk: int) -> None:
        checksum, at = 0, chunk * CHUNK_BYTES
        for name, begin, first, count in pieces.get(chunk, ()):
            checksum = zlib.crc32(bytes(begin - at), checksum)
            part = flat[name][first : first + count].data
            _write_all(descriptor, part, start + begin)
            checksum, at = zlib.crc32(part, checksum), begin + count
        checksums[chunk] = zlib.crc32(bytes(min(data_bytes, (chunk + 1) * CHUNK_BYTES) - at), checksum)

    os.truncate(descriptor, start + data_bytes)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(len(checksums))))
    header = _header(fingerprint, data_bytes, described, checksums)
    assert len(header) == len(empty), "checksums are written with a fixed length"
    prefix = _PREFIX.pack(MAGIC, len(header), zlib.crc32(header))
    _write_all(descriptor, memoryview(prefix + header), 0)
    return start + data_bytes


def read_entry(path: Path, fingerprint: str, threads: int) -> dict[str, Array]:
    """Reads the arrays of an entry into new memory and checks all of their bytes.

    Raises EntryError if the file was made of another source or with other settings, or if it is damaged. Raises
    FileNotFoundError if there is no file, and OSError if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        header, start = _read_header(descriptor)
        if header["fingerprint"] != fingerprint:
            raise EntryError("the checkpoint, the settings or the program have changed since it was written")
        return _read_arrays(descriptor, header, start, threads)
    except (KeyError, TypeError, ValueError) as error:
        raise EntryError(f"its header is wrong ({type(error).__name__}: {error})") from error
    finally:
        os.close(descriptor)


def _read_arrays(descriptor: int, header: dict[str, Any], start: int, threads: int) -> dict[str, Array]:
    data_bytes, checksums = int(header["data_bytes"]), list(header["checksums"])
    size = os.fstat(descriptor).st_size
    if size != start + data_bytes or len(checksums) != math.ceil(data_bytes / CHUNK_BYTES):
        raise EntryError(f"it has {size} bytes, and its header promises {start + data_bytes}")
    arrays: dict[str, Array] = {}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for each in header["arrays"]:
        name, begin, shape = str(each["name"]), int(each["begin"]), tuple(int(length) for length in each["shape"])
        if each["dtype"] not in _DTYPES or min(shape, default=1) < 0 or begin != _aligned(end) or name in arrays:
            raise EntryError(f"its header describes the array {name!r} wrongly")
        dtype = np.dtype(each["dtype"])
        end = begin + math.prod(shape) * dtype.itemsize
        if end > data_bytes:
            raise EntryError(f"the array {name!r} ends behind the file")
        places[name] = (begin, end - begin)
        arrays[name] = weight_blob(end - begin).view(dtype).reshape(shape)
    flat, pieces = {name: _bytes_of(array) for name, array in arrays.items()}, _pieces(places)

    def read(chunk: int) -> bool:
        checksum, at = 0, chunk * CHUNK_BYTES
        for name, begin, first, count in pieces.get(chunk, ()):
            checksum = zlib.crc32(os.pread(descriptor, begin - at, start + at), checksum)
            part = flat[name][first : first + count].data
            _read_all(descriptor, part, start + begin)
            checksum, at = zlib.crc32(part, checksum), begin + count
        rest = min(data_bytes, (chunk + 1) * CHUNK_BYTES) - at
        return zlib.crc32(os.pread(descriptor, rest, start + at), checksum) == int(checksums[chunk], 16)

    with ThreadPoolExecutor(threads) as pool:
        correct = list(pool.map(read, range(len(checksums))))
    if not all(correct):
        raise EntryError(f"the checksums of {correct.count(False)} of {len(correct)} pieces are wrong")
    return arrays


def _read_header(descriptor: int) -> tuple[dict[str, Any], int]:
    """Returns the header, and the position of the arrays in the file."""
    prefix = os.pread(descriptor, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise EntryError(f"it has only {len(prefix)} bytes")
    magic, length, checksum = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise EntryError("it is of another version, or no file of converted weights")
    if length > MAX_HEADER_BYTES:
        raise EntryError(f"its header has {length} bytes; at most {MAX_HEADER_BYTES}")
    text = os.pread(descriptor, length, _PREFIX.size)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise EntryError("the checksum of its header is wrong")
    header: dict[str, Any] = json.loads(text)
    return header, _aligned(_PREFIX.size + length)


def _header(fingerprint: str, data_bytes: int, arrays: list[dict[str, Any]], checksums: list[int]) -> bytes:
    texts = [f"{checksum:08x}" for checksum in checksums]
    content = {"fingerprint": fingerprint, "data_bytes": data_bytes, "arrays": arrays, "checksums": texts}
    return json.dumps(content).encode()


def _places(arrays: Mapping[str, Array]) -> tuple[dict[str, tuple[int, int]], int]:
    """Returns the position and the bytes of each array, and the bytes of all with the gaps between them."""
    places, end = {}, 0
    for name, array in arrays.items():
        begin = _aligned(end)
        places[name], end = (begin, array.nbytes), begin + array.nbytes
    return places, end


def _pieces(places: Mapping[str, tuple[int, int]]) -> dict[int, list[tuple[str, int, int, int]]]:
    """Returns the parts of arrays in each chunk: the array's name, the position in the data, and the array's bytes."""
    pieces: dict[int, list[tuple[str, int, int, int]]] = {}
    for name, (begin, size) in places.items():
        at = begin
        while at < begin + size:
            chunk = at // CHUNK_BYTES
            count = min((chunk + 1) * CHUNK_BYTES, begin + size) - at
            pieces.setdefault(chunk, []).append((name, at, at - begin, count))
            at += count
    return pieces


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
