"""Reads one safetensors file through a memory map, and checks its header before it reads a tensor.

This module does not use the safetensors library, for four reasons. The library's NumPy interface has no bfloat16. An
agent of a group reads only its part of a tensor, as a view. ``release`` gives pages back to the system, so loading
needs the memory of the weights only once. Errors name the file, the tensor and the remedy.

``llm_serving.formats.safetensors_index`` reads the header. This project writes safetensors files with the library.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.errors import CheckpointError
from llm_serving.formats.safetensors_index import LENGTH_BYTES, TensorInfo, read_index

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS: dict[str, Any] = {"I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8}
"""NumPy's types of integers, and of the bits of 8-bit floats."""


class SafetensorsFile:
    """A memory-mapped safetensors file. The constructor raises CheckpointError for a wrong header or a short file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping, size = _map_file(path)
        try:
            self._data_start, self.tensors = read_index(path, self._mapping, size)
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

        Call this after a tensor has been converted, so that memory does not hold the file and the loaded weights at
        the same time.
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
        if status.st_size < LENGTH_BYTES + 2:
            raise CheckpointError(f"{path}: {status.st_size} bytes are too few for a safetensors file; it is truncated")
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), status.st_size
    finally:
        os.close(descriptor)
