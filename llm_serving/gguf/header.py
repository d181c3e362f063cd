"""Reads the start of a GGUF file (llama.cpp's format): its metadata, and the position of each tensor.

A file of version 2 or 3 is little-endian. It begins with "GGUF", the version (u32), the number of tensors (u64) and the
number of metadata entries (u64). An entry is a key, a type (u32) and a value. A text is its length (u64) and its bytes.
An array is the type of its elements (u32), their number (u64) and the elements.

After the metadata, each tensor has an entry. It begins with the name, the number of dimensions (u32) and the
dimensions (u64, the innermost first). The type (u32) and the offset of the data (u64) follow. Offsets count from the
first aligned position after the entries.

The specification is docs/gguf.md of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llm_serving.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 65_536
"""Maximum number of entries in the metadata of a GGUF file."""
MAX_TENSORS = 1_000_000
"""Maximum number of tensors of a GGUF file."""
MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Maximum size of a text in the metadata."""
MAX_ELEMENTS = 16 * 1024 * 1024
"""Maximum number of elements of a list in the metadata."""
MAX_DIMENSIONS = 4
"""Maximum number of dimensions of a tensor."""
MAX_ALIGNMENT = 1 << 20
"""Maximum alignment of the tensors of a GGUF file, in bytes."""

_FLOAT32, _STRING, _ARRAY = 6, 8, 9
"""GGUF's numbers of the types float32, text and list."""
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors: blocks of ``block_size`` values, with ``block_bytes`` bytes each."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""The supported types of tensors, by the number that stands for the type in a file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file: its type, its shape (outermost dimension first), and the position of its data."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    begin: int
    """Position of the data in the file."""
    size: int
    """Bytes of the data."""


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata and the tensors of a GGUF file, by name. Texts and numbers are plain Python values."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture, for example ``llama``.

        Keys such as ``llama.block_count`` begin with it.
        """
        found = self.metadata.get("general.architecture")
        return found if isinstance(found, str) else ""


def read_header(path: Path) -> Header:
    """Returns the metadata and tensors of a file. Raises CheckpointError if the file is not complete and valid.

    The result is cached until the file changes.
    """
    try:
        found = path.stat()
        return _read_once(path, found.st_size, found.st_mtime_ns)
    except (OSError, ValueError, OverflowError, UnicodeDecodeError, struct.error) as reason:
        raise CheckpointError(f"{path}: not a GGUF file that can be read, or truncated: {reason}") from reason


@lru_cache(maxsize=2)
def _read_once(path: Path, size: int, changed_ns: int) -> Header:
    if not path.is_file():
        raise ValueError("it is not a regular file")
    if size == 0:
        raise ValueError("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).header()


class _Reader:
    """Reads one file from its start. ``_at`` is the position of the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        if self._take(4) != MAGIC or self._number("<I") not in VERSIONS:
            raise ValueError(f"it does not begin as a GGUF file of version {' or '.join(map(str, VERSIONS))}")
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_entries = self._count("entries", MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text()
            if key in metadata:
                raise ValueError(f"it has the entry {key!r} twice")
            metadata[key] = self._value(self._number("<I"))
        if metadata.get("split.count", 1) != 1:
            raise ValueError("it is one of several parts; join the parts with llama.cpp's llama-gguf-split --merge")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment is {alignment!r}; it must be a power of two up to {MAX_ALIGNMENT}")
        entries = [self._tensor() for _ in range(num_tensors)]
        first = -(-self._at // alignment) * alignment
        return Header(self._path, metadata, self._placed(entries, first))

    def _placed(self, entries: list[TensorEntry], first: int) -> dict[str, TensorEntry]:
        """Returns the tensors by name, with positions from the start of the file.

        ``first`` is the position where the tensors' data begins.
        """
        placed: dict[str, TensorEntry] = {}
        for each in entries:
            begin = first + each.begin
            if begin + each.size > len(self._data):
                end = begin + each.size
                raise ValueError(f"tensor {each.name} ends at byte {end}, and the file has {len(self._data)} bytes")
            if each.name in placed:
                raise ValueError(f"it has the tensor {each.name!r} twice")
            placed[each.name] = TensorEntry(each.name, each.type, each.shape, begin, each.size)
        return placed

    def _tensor(self) -> TensorEntry:
        name, num_dimensions = self._text(), self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions; there are 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number("<Q") for _ in range(num_dimensions)]))
        number, begin = self._number("<I"), self._number("<Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise ValueError(f"tensor {name} has the type with number {number}; supported are {known}")
        if shape[-1] % kind.block_size or 0 in shape:
            raise ValueError(f"tensor {name} has shape {list(shape)}; {kind.name} needs blocks of {kind.block_size}")
        return TensorEntry(name, kind, shape, begin, math.prod(shape) // kind.block_size * kind.block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _FLOAT32:
            return _shortest(self._number("<f"))
        if kind != _ARRAY:
            return self._number(self._form(kind))
        elements, count = self._number("<I"), self._count("elements", MAX_ELEMENTS)
        if elements == _STRING:
            return [self._text() for _ in range(count)]
        if elements == _ARRAY:
            raise ValueError("it has an array of arrays")
        form = self._form(elements)
        data = self._take(struct.calcsize(form) * count)
        return list(struct.unpack(f"<{count}{form[1]}", data))

    def _form(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"it has a value of type {kind}")
        return _NUMBERS[kind]

    def _count(self, what: str, most: int) -> int:
        count: int = self._number("<Q")
        if count > most:
            raise ValueError(f"it claims {count} {what}; at most {most} are read")
        return count

    def _text(self) -> str:
        size = self._number("<Q")
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"it has a text of {size} bytes; the maximum is {MAX_TEXT_BYTES}")
        return self._take(size).decode("utf-8")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise ValueError("it ends early")
        data = self._data[self._at : self._at + count]
        self._at += count
        return data


def _shortest(value: float) -> float:
    """Returns the shortest decimal number that rounds to ``value`` in float32.

    For 9.9999997e-6, this is 1e-5, the value that the model's publisher wrote.
    """
    if math.isfinite(value):
        for digits in range(1, 9):
            rounded = float(f"{value:.{digits}g}")
            if struct.pack("<f", rounded) == struct.pack("<f", value):
                return rounded
    return value
