"""A quantised tensor in its one form in memory, whatever the file's format was: value = (integer - zero) * scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from agent.weights.storage import Array

INT4_ZERO = 8
"""The zero point of int4 values where none is stored."""
_PIECE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Scheme:
    """What must agree for tensors to be joined to one."""

    format: Literal["int8", "int4"]
    group: int
    """Inputs that share a scale; 0: a whole row does."""

    def __str__(self) -> str:
        return f"{self.format} with {f'groups of {self.group}' if self.group else 'a scale per row'}"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """[out, in] integers with ``groups`` scales a row, each of the inputs ``group * i`` to ``group * (i + 1) - 1``."""

    scheme: Scheme
    values: Array
    """[out, in]: int8, or for int4 uint8 from 0 to 15, one a byte."""
    scales: npt.NDArray[np.float32]
    """[out, groups]"""
    zeros: npt.NDArray[np.uint8] | None = None
    """int4 only, [out, groups] from 0 to 15; None: 8 everywhere. int8 has a zero point of 0."""
    group_of_input: npt.NDArray[np.int32] | None = None
    """[in], where groups are not consecutive inputs (GPTQ's ``desc_act``). Kernels cannot take such a tensor."""

    def dequantise_rows(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Rows as float32 [end - begin, in]: the difference is exact, the product is rounded once."""
        scales, zeros = self.scales[begin:end], None if self.zeros is None else self.zeros[begin:end]
        rows = self.values[begin:end].astype(np.float32)
        if self.group_of_input is not None:
            rows -= INT4_ZERO_FLOAT if zeros is None else zeros[:, self.group_of_input]
            rows *= scales[:, self.group_of_input]
            return rows
        grouped = rows.reshape(len(rows), scales.shape[1], -1)
        if self.scheme.format == "int4":
            grouped -= INT4_ZERO_FLOAT if zeros is None else zeros[:, :, None]
        grouped *= scales[:, :, None]
        return rows

    def rows_at_once(self) -> int:
        """Rows to dequantise at a time, for a piece that fits a cache."""
        return max(1, _PIECE_ELEMENTS // max(self.values.shape[1], 1))


INT4_ZERO_FLOAT = np.float32(INT4_ZERO)


def nibbles(words: Array) -> npt.NDArray[np.uint8]:
    """int32 [..., n] -> uint8 [..., 8 n] from 0 to 15: the lowest four bits of a word first."""
    pairs = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    values = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.uint8)
    np.bitwise_and(pairs, 15, out=values[..., 0::2])
    np.right_shift(pairs, 4, out=values[..., 1::2])
    return values


def bytes_of(words: Array) -> npt.NDArray[np.uint8]:
    """int32 [..., n] -> uint8 [..., 4 n]: the lowest eight bits of a word first. A copy."""
    return np.array(words, "<i4", order="C").view(np.uint8)


def unpacked(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """``nibbles`` or ``bytes_of``."""
    return nibbles(words) if bits == 4 else bytes_of(words)


def without_usual_zeros(zeros: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | None:
    """None where every zero point is the usual one of int4."""
    return None if bool((zeros == INT4_ZERO).all()) else zeros


def signed(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Bytes with a zero point of 128 as int8, in place."""
    values ^= np.uint8(0x80)
    return values.view(np.int8)
