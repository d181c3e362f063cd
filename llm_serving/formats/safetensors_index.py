"""Reads and checks the index of a safetensors file: the name, type, shape and position of each tensor.

The format is 8 bytes N (little-endian), N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the
data.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import no_duplicate_keys

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Maximum size of the header of a safetensors file."""
LENGTH_BYTES = 8
"""Number of bytes that state the length of the header."""
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_DTYPE_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the index. ``dtype`` is spelled as in the file. The tensor's bytes are ``begin .. end - 1``, counted
    from the start of the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_index(path: Path, content: mmap.mmap | bytes, size: int) -> tuple[int, dict[str, TensorInfo]]:
    """Returns the position of the data in the file, and the tensors by name.

    ``content`` has the ``size`` bytes of the file. Raises CheckpointError for a wrong header or a short file.
    """
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise CheckpointError(
            f"{path}: the header claims {length} bytes; the file has {size}, and {MAX_HEADER_BYTES} is the limit: "
            "it is truncated or not a safetensors file"
        )
    data_start = LENGTH_BYTES + length
    try:
        header = json.loads(content[LENGTH_BYTES:data_start], object_pairs_hook=no_duplicate_keys)
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
