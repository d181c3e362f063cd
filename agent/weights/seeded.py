"""Generates random weights that depend only on a seed and the tensor's name (for ``load_format: dummy`` and tests).

The algorithm, so that another tool can generate the same numbers:

1. ``table[i] = float32(inverse normal CDF of (i + 0.5) / 65536)`` for i in 0..65535
   (``statistics.NormalDist().inv_cdf``): 65,536 equally likely values of a standard normal.
2. A tensor is cut, in row-major order, into chunks of 2**20 elements, the last one shorter. Chunk c of the tensor
   ``name`` takes its bits from NumPy's SFC64, seeded (through SeedSequence) with
   ``int.from_bytes(sha256(f"{seed}/{name}/{c}").digest()[:16], "little")``.
3. Every 64-bit number gives four indices, the low 16 bits first; element = ``table[index] * float32(std)``, rounded
   to the wanted type.

Tensors whose names end in ``norm.weight`` are ones. The values do not depend on the order in which tensors are read, on
shards, or on how the model joins its weights. A chunk of 2**20 values takes about 2 ms.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from functools import cache

import numpy as np
import numpy.typing as npt

from agent.weights.cuts import TensorCut
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array, from_float32

TABLE_SIZE = 1 << 16
"""Number of different random values."""
CHUNK_ELEMENTS = 1 << 20
"""Number of elements that share a random generator."""
_PIECE_ELEMENTS = 1 << 16
"""Number of elements that are generated at a time."""
DUMMY_STD = 0.02
"""Standard deviation of the random weights of ``load_format: dummy``."""


@cache
def normal_table() -> npt.NDArray[np.float32]:
    """Returns 65,536 equally likely values of a standard normal, the ``table`` of the module's description."""
    inverse_cdf = statistics.NormalDist().inv_cdf
    return np.array([inverse_cdf((i + 0.5) / TABLE_SIZE) for i in range(TABLE_SIZE)], np.float32)


@cache
def _scaled_table(std: float, dtype: str) -> Array:
    return from_float32(normal_table() * np.float32(std), dtype)


def fill_seeded(name: str, out: Array, dtype: str, *, seed: int, std: float = DUMMY_STD) -> None:
    """Fills ``out`` with the random values of the tensor ``name``. ``out`` is contiguous and has elements of ``dtype``.

    The values are normally distributed with the standard deviation ``std``. Weights of norms are ones.
    """
    flat = out.reshape(-1)
    if name.endswith("norm.weight"):
        flat[:] = from_float32(np.ones(1, np.float32), dtype)
        return
    table = _scaled_table(std, dtype)
    for chunk in range(-(-flat.size // CHUNK_ELEMENTS)):
        _fill_chunk(table, flat[chunk * CHUNK_ELEMENTS : (chunk + 1) * CHUNK_ELEMENTS], f"{seed}/{name}/{chunk}")


def fill_seeded_cut(name: str, out: Array, dtype: str, cut: TensorCut, *, seed: int, std: float = DUMMY_STD) -> None:
    """Fills ``out`` with a part of the tensor ``name``. Generates only the chunks that contain the part's rows."""
    if name.endswith("norm.weight"):
        fill_seeded(name, out, dtype, seed=seed, std=std)
        return
    table = _scaled_table(std, dtype)
    total = math.prod(cut.whole)
    width = total // cut.whole[0]
    rows = max(1, CHUNK_ELEMENTS // width)
    drawn = _DrawnChunk(table, f"{seed}/{name}", total)
    for first in range(cut.rows.start, cut.rows.stop, rows):
        last = min(first + rows, cut.rows.stop)
        piece = drawn.read(first * width, last * width).reshape(last - first, *cut.whole[1:])
        begin = first - cut.rows.start
        out[begin : begin + last - first] = piece if cut.columns is None else piece[:, cut.columns.slice]


class _DrawnChunk:
    """Generates ranges of elements of a random tensor.

    Keeps the last generated chunk, because the next range often needs the same chunk.
    """

    def __init__(self, table: Array, key: str, total: int) -> None:
        self._table = table
        self._key = key
        self._total = total
        self._number = -1
        self._chunk = np.empty(0, table.dtype)

    def read(self, begin: int, end: int) -> Array:
        """Returns the elements ``begin`` to ``end`` of the flattened tensor, in new memory."""
        out = np.empty(end - begin, self._table.dtype)
        at = begin
        while at < end:
            number, offset = divmod(at, CHUNK_ELEMENTS)
            self._draw(number)
            count = min(end - at, CHUNK_ELEMENTS - offset)
            out[at - begin : at - begin + count] = self._chunk[offset : offset + count]
            at += count
        return out

    def _draw(self, number: int) -> None:
        if number != self._number:
            size = min(CHUNK_ELEMENTS, self._total - number * CHUNK_ELEMENTS)
            self._chunk = np.empty(size, self._table.dtype)
            _fill_chunk(self._table, self._chunk, f"{self._key}/{number}")
            self._number = number


def _fill_chunk(table: Array, out: Array, key: str) -> None:
    digest = hashlib.sha256(key.encode()).digest()
    generator = np.random.SFC64(int.from_bytes(digest[:16], "little"))
    for start in range(0, out.size, _PIECE_ELEMENTS):
        piece = out[start : start + _PIECE_ELEMENTS]
        words: npt.NDArray[np.uint64] = generator.random_raw(-(-piece.size // 4))
        np.take(table, words.astype("<u8", copy=False).view("<u2")[: piece.size], out=piece, mode="clip")


class SeededWeights:
    """A ``WeightSource`` that generates random weights of any shape."""

    def __init__(self, seed: int, std: float = DUMMY_STD) -> None:
        self._seed = seed
        self._std = std

    def scheme(self, part: WeightPart) -> Scheme | None:
        """Returns None, because random weights are floats."""
        return None

    def float_dtype(self, name: str) -> str | None:
        """Returns None, because random weights can have any type."""
        return None

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        """Raises AssertionError. Callers must not call it, because ``scheme`` returns None for every tensor."""
        raise AssertionError(f"{part.name} is not quantised")

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        """Fills ``out`` with the tensor ``name`` or one part of the tensor."""
        if cut is None:
            fill_seeded(name, out, dtype, seed=self._seed, std=self._std)
        else:
            fill_seeded_cut(name, out, dtype, cut, seed=self._seed, std=self._std)

    def close(self) -> None:
        """Does nothing, because nothing is open."""
