"""Shared memory with a LoRA adapter: the server writes it, and the agents copy it into one of their adapter slots.

The segment begins with a number N (8 bytes, little-endian). N bytes of MessagePack follow, with a list of
``AdapterModule``. Then come the matrices, each at a multiple of 64 bytes. The segment keeps its name as long as the
adapter is loaded, because restarted agents map it again.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from llm_serving.errors import ProtocolError
from llm_serving.ipc.alignment import aligned
from llm_serving.ipc.segment import NamedSegment, map_segment, new_segment

Array = npt.NDArray[Any]

_LENGTH_BYTES = 8
"""Size in bytes of the number N at the beginning of the segment."""
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Offset = Annotated[int, msgspec.Meta(ge=0)]


class AdapterModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapter of one linear layer: its sizes, and the byte offsets of its matrices A and B in the shared memory."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    scale: float
    rank: _Size
    inputs: _Size
    outputs: _Size
    a_begin: _Offset
    b_begin: _Offset


class AdapterMemory(NamedSegment):
    """A shared-memory segment with one adapter.

    ``dtype`` is the NumPy type of the matrices. NumPy has no bfloat16, so bfloat16 values are stored as uint16.
    """

    def __init__(self, name: str, mapping: mmap.mmap, dtype: Any) -> None:
        super().__init__(name)
        self.num_bytes = len(mapping)
        self._mapping = mapping
        self._dtype = np.dtype(dtype)
        self._digest = b""

    @classmethod
    def create(cls, modules: Sequence[tuple[str, float, Array, Array]]) -> AdapterMemory:
        """Creates a segment with one LoRA adapter.

        ``modules`` has, for each adapted linear layer, its name, its scale and its matrices A [rank, inputs] and
        B [outputs, rank]. All matrices must have the same type. Raises OSError if /dev/shm is too small.
        """
        sizes = [(each[2].nbytes, each[3].nbytes) for each in modules]
        # The index, a list of ``AdapterModule``, comes before the matrices and contains their offsets. These offsets
        # depend on the size of the index. So the space for the index is computed with very large offsets.
        room = len(msgspec.msgpack.encode(_index(modules, 1 << 40, sizes)))
        start = aligned(_LENGTH_BYTES + room)
        index = _index(modules, start, sizes)
        encoded = msgspec.msgpack.encode(index)
        end = start + sum(aligned(a) + aligned(b) for a, b in sizes)
        with new_segment(end) as (name, mapping):
            memory = cls(name, mapping, modules[0][2].dtype)
            mapping[:_LENGTH_BYTES] = len(encoded).to_bytes(_LENGTH_BYTES, "little")
            mapping[_LENGTH_BYTES : _LENGTH_BYTES + len(encoded)] = encoded
            for module, (_, _, a, b) in zip(index, modules, strict=True):
                mapping[module.a_begin : module.a_begin + a.nbytes] = a.tobytes()
                mapping[module.b_begin : module.b_begin + b.nbytes] = b.tobytes()
        memory.has_name = True
        return memory

    @classmethod
    def create_empty(cls, num_bytes: int) -> AdapterMemory:
        """Creates a segment of zeros for an adapter from another machine. ``write`` or ``read_from`` fills it later.

        Raises OSError if /dev/shm is too small.
        """
        with new_segment(num_bytes) as (name, mapping):
            memory = cls(name, mapping, np.uint8)
        memory.has_name = True
        return memory

    @classmethod
    def attach(cls, name: str, num_bytes: int, dtype: Any) -> AdapterMemory:
        """Maps a segment that the server created. Raises ProtocolError if its name or size is wrong."""
        return cls(name, map_segment(name, num_bytes, "adapter"), dtype)

    def modules(self) -> list[tuple[AdapterModule, Array, Array]]:
        """Returns each module with views of its matrices A [rank, inputs] and B [outputs, rank].

        Raises ProtocolError if the content is damaged.
        """
        length = int.from_bytes(self._mapping[:_LENGTH_BYTES], "little")
        try:
            encoded = self._mapping[_LENGTH_BYTES : _LENGTH_BYTES + min(length, self.num_bytes)]
            index = msgspec.msgpack.decode(encoded, type=list[AdapterModule])
            return [(each, self._view(each.a_begin, each.rank, each.inputs),
                     self._view(each.b_begin, each.outputs, each.rank)) for each in index]  # fmt: skip
        except (msgspec.DecodeError, ValueError) as problem:
            raise ProtocolError(f"the adapter in {self.name} is damaged: {problem}") from None

    def digest(self) -> bytes:
        """Returns the SHA-256 of the content. The first call reads the whole segment."""
        if not self._digest:
            self._digest = hashlib.sha256(self._mapping).digest()
        return self._digest

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Returns ``num_bytes`` bytes of the content, from byte ``begin`` on."""
        return self._mapping[begin : begin + num_bytes]

    def write(self, begin: int, data: bytes) -> None:
        """Replaces the bytes of the content from byte ``begin`` on by ``data``."""
        self._mapping[begin : begin + len(data)] = data
        self._digest = b""

    def read_from(self, file: BinaryIO) -> bool:
        """Replaces the content by the bytes of a file. Returns False if the file has another size. Raises OSError."""
        self._digest = b""
        count = 0
        with memoryview(self._mapping) as view:
            while read := file.readinto(view[count:]):  # type: ignore[attr-defined]
                count += read
        return count == self.num_bytes and not file.read(1)

    def write_to(self, file: BinaryIO) -> None:
        """Writes the content to a file. Raises OSError."""
        file.write(self._mapping)

    def _view(self, begin: int, rows: int, columns: int) -> Array:
        view = np.frombuffer(self._mapping, self._dtype, rows * columns, begin)
        return view.reshape(rows, columns)

    def close(self) -> None:
        """Removes the segment's name. Its memory is freed when no array refers to it any more."""
        self.unlink()


def _index(
    modules: Sequence[tuple[str, float, Array, Array]], start: int, sizes: Sequence[tuple[int, int]]
) -> list[AdapterModule]:
    index = []
    for (name, scale, a, b), (a_bytes, b_bytes) in zip(modules, sizes, strict=True):
        b_begin = start + aligned(a_bytes)
        index.append(AdapterModule(name, scale, a.shape[0], a.shape[1], b.shape[0], start, b_begin))
        start = b_begin + aligned(b_bytes)
    return index

