"""Reads one safetensors file through a memory map, and checks its header before it reads a tensor.

This module does not use the safetensors library, for four reasons. The library's NumPy interface has no bfloat16. An
agent of a group reads only its part of a tensor, as a view. ``release`` gives pages back to the system, so loading
needs the memory of the weights only once. Errors name the file, the tensor and the remedy.

The format is 8 bytes N (little-endian), N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the
data. This project writes safetensors files with the library.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import no_duplicate_keys

MAX_HEADER_BYTES = 100 * 1024 * 1024
_LENGTH_BYTES = 8
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_INTEGERS: dict[str, Any] = {"I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8}
"""NumPy's types of integers, and of the bits of 8-bit floats."""
_DTYPE_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type, shape and place of a tensor in its file. ``dtype`` is spelled as in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A memory-mapped safetensors file. The constructor raises CheckpointError for a wrong header or a short file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping, size = _map_file(path)
        try:
            self._data_start, self.tensors = _read_header(path, self._mapping, size)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> tuple[Array, str]:
        """Returns a view of a tensor of floats as it is stored, and the name of its type.

        The view is valid until ``close``. Raises CheckpointError if the tensor does not have floats.
        """
        info = self.tensors[name]
        if info.dtype not in _DTYPE_NAMES:
            known = ", ".join(_DTYPE_NAMES)
            raise CheckpointError(f"{self.path}: tensor {name} has type {info.dtype}; weights must be one of {known}")
        return self._view(info, STORAGE_DTYPES[_DTYPE_NAMES[info.dtype]]), _DTYPE_NAMES[info.dtype]

    def read_stored(self, name: str) -> tuple[Array, str]:
        """Returns a view of a tensor, and its type as it is spelled in the file. 8-bit floats are returned as bits."""
        info = self.tensors[name]
        storage = STORAGE_DTYPES[_DTYPE_NAMES[info.dtype]] if info.dtype in _DTYPE_NAMES else _INTEGERS.get(info.dtype)
        if storage is None:
            raise CheckpointError(f"{self.path}: tensor {name} has type {info.dtype}, which is not supported")
        return self._view(info, storage), info.dtype

    def _view(self, info: TensorInfo, storage: Any) -> Array:
        offset = self._data_start + info.begin
        return np.frombuffer(self._mapping, storage, count=math.prod(info.shape), offset=offset).reshape(info.shape)

    def release(self, name: str) -> None:
        """Frees the memory pages into which a tensor was read.

        Call this after the tensor has been converted. Then memory need not hold the file and the loaded weights.
        """
        info = self.tensors[name]
        begin = (self._data_start + info.begin) // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, begin, self._data_start + info.end - begin)

    def close(self) -> None:
        """Unmaps the file. If a view of the file still exists, the file is unmapped with the last view."""
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _map_file(path: Path) -> tuple[mmap.mmap, int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as reason:
        raise CheckpointError(f"{path}: cannot be opened: {reason.strerror}") from reason
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        if status.st_size < _LENGTH_BYTES + 2:
            raise CheckpointError(f"{path}: {status.st_size} bytes are too few for a safetensors file; it is truncated")
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), status.st_size
    finally:
        os.close(descriptor)


def _read_header(path: Path, mapping: mmap.mmap, size: int) -> tuple[int, dict[str, TensorInfo]]:
    length = int.from_bytes(mapping[:_LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise CheckpointError(
            f"{path}: the header claims {length} bytes; the file has {size}, and {MAX_HEADER_BYTES} is the limit: "
            "it is truncated or not a safetensors file"
        )
    data_start = _LENGTH_BYTES + length
    try:
        header = json.loads(mapping[_LENGTH_BYTES:data_start], object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as reason:
        raise CheckpointError(f"{path}: the header is not valid JSON: {reason}") from reason
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object, not {type(header).__name__}")
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry) for name, entry in header.items()}
    _check_extents(path, sorted(tensors.values(), key=lambda info: (info.begin, info.end)), size - data_start)
    return data_start, tensors


def _tensor_info(path: Path, name: str, entry: object) -> TensorInfo:
    values: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = values.get("dtype"), values.get("shape"), values.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{path}: the header's entry of tensor {name!r} is malformed: {str(entry)[:200]}")
    info = TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])
    if dtype in _DTYPE_BYTES and info.end - info.begin != math.prod(info.shape) * _DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(info.shape)} and type {dtype} cannot have "
            f"{info.end - info.begin} bytes"
        )
    return info


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extents(path: Path, tensors: list[TensorInfo], data_bytes: int) -> None:
    end = 0
    for info in tensors:
        if info.begin < end or info.end < info.begin:
            raise CheckpointError(f"{path}: tensor {info.name} lies at bytes {info.begin} to {info.end}, over another")
        end = info.end
    if end > data_bytes:
        raise CheckpointError(
            f"{path}: the tensors need {end} bytes of data, the file has {data_bytes}: it is truncated; "
            "copy or download it again"
        )
