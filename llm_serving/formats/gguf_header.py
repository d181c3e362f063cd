"""Reads the header of a GGUF file (llama.cpp's format) without reading any tensor: one number of it, or a check.

A GGUF file of version 2 or 3 is little-endian. It begins with "GGUF", the version (u32), the number of tensors (u64)
and the number of metadata entries (u64). An entry is a key, a type (u32) and a value. A text is its length (u64) and
its bytes. An array is the type of its elements (u32), their number (u64) and the elements. Then follow the tensors:
name, number of dimensions (u32), dimensions (u64), type (u32) and offset (u64).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from llm_serving.errors import CheckpointError

_UINT32, _STRING, _ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_KEY_BYTES = 65_535
_MAX_ELEMENTS = 16 * 1024 * 1024
_MAX_ENTRIES = 65_536
_MAX_DIMENSIONS = 8


def read_gguf_uint32(path: Path, wanted: str) -> int | None:
    """Return the metadata entry ``wanted`` of type u32, or None if it is absent. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return _find(file, wanted.encode())
    except (OSError, ValueError, OverflowError) as reason:
        raise CheckpointError(f"{path}: not a GGUF file that can be read, or truncated: {reason}") from reason


def check_gguf_header(path: Path) -> None:
    """Raise ValueError or OSError unless every length and number in the header fits the file.

    The package gguf allocates and loops for what the header claims, so a damaged file would fill the memory.
    """
    with path.open("rb") as file:
        tensors, entries = _counts(file)
        for _ in range(entries):
            _take(file, min(_number(file, "<Q"), _MAX_KEY_BYTES))
            _skip(file, _number(file, "<I"))
        for _ in range(tensors):
            _take(file, min(_number(file, "<Q"), _MAX_KEY_BYTES))
            dimensions = _number(file, "<I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"it has a tensor of {dimensions} dimensions")
            _take(file, 8 * dimensions + 12)


def _counts(file: BinaryIO) -> tuple[int, int]:
    """Return the number of tensors and of entries."""
    if _take(file, 4) != b"GGUF" or _number(file, "<I") not in (2, 3):
        raise ValueError("it does not begin as one")
    tensors, entries = _number(file, "<Q"), _number(file, "<Q")
    if tensors > _MAX_ENTRIES or entries > _MAX_ENTRIES:
        raise ValueError(f"it claims {tensors} tensors and {entries} entries")
    return tensors, entries


def _find(file: BinaryIO, wanted: bytes) -> int | None:
    _, entries = _counts(file)
    for _ in range(entries):
        key, kind = _take(file, min(_number(file, "<Q"), _MAX_KEY_BYTES)), _number(file, "<I")
        if key == wanted and kind == _UINT32:
            return _number(file, "<I")
        _skip(file, kind)
    return None


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_number(file, "<Q"), os.SEEK_CUR)
    elif kind == _ARRAY:
        elements, count = _number(file, "<I"), _number(file, "<Q")
        if count > _MAX_ELEMENTS or elements == _ARRAY:
            raise ValueError("it has an array that is too large or nested")
        if elements == _STRING:
            for _ in range(count):
                _skip(file, _STRING)
        else:
            file.seek(_size(elements) * count, os.SEEK_CUR)
    else:
        file.seek(_size(kind), os.SEEK_CUR)


def _size(kind: int) -> int:
    if kind not in _SIZES:
        raise ValueError(f"it has a value of type {kind}")
    return _SIZES[kind]


def _number(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, _take(file, struct.calcsize(form)))[0]
    return value


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it ends early")
    return data
