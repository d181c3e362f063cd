"""Reads weights of 8-bit floats with a scale for each block, as DeepSeek V3 stores them.

weight            F8_E4M3 [out, in]
weight_scale_inv  float [blocks of out, blocks of in]

value = weight * weight_scale_inv of the weight's block, computed in float32 and rounded once. The name ends in ``inv``,
because DeepSeek multiplied the weights by the inverse, 1 / weight_scale_inv, before rounding them to 8 bits. Blocks at
the end of a row or column may be smaller. An e4m3 float has 1 sign bit, 4 exponent bits (bias 7) and 3 mantissa bits.
It has no infinity, and only the codes 0x7F and 0xFF are NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.weights.cuts import TensorCut
from agent.weights.decoder import FLOAT_NAMES, FLOAT_TYPES, StoredTensor
from agent.weights.layout import WeightPart
from agent.weights.storage import Array, from_float32, to_float32
from agent.weights.tensor_files import TensorFiles
from llm_serving.errors import CheckpointError
from llm_serving.model.float8 import Float8Blocks
from llm_serving.model.parallel import Span

_SCALES = "_scale_inv"
_PIECE_ELEMENTS = 1 << 18
"""Approximate number of elements that are converted at a time."""


def _values() -> npt.NDArray[np.float32]:
    """Returns the float32 value of each of the 256 e4m3 codes."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents == 0, np.ldexp(mantissas, -9), np.ldexp(8 + mantissas, exponents - 10))
    values = np.where(codes < 128, sizes, -sizes).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


_VALUES = _values()


def weight_of(name: str) -> str:
    """Returns the name of the weight to which a tensor of scales belongs. Other names are returned unchanged."""
    return name.removesuffix(_SCALES)


class Float8Reader:
    """Reads the weights of a folder that are 8-bit floats. Other tensors of the folder are ordinary floats."""

    def __init__(self, files: TensorFiles, blocks: Float8Blocks) -> None:
        self._files = files
        self._blocks = blocks

    def holds(self, name: str) -> bool:
        """Returns True if the weight ``name`` is stored as 8-bit floats or has a tensor of scales."""
        is_float8 = name in self._files and self._files.info(name).dtype == "F8_E4M3"
        return is_float8 or name + _SCALES in self._files

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        """Returns the tensors that the folder must contain for a weight: the 8-bit floats and their scales."""
        rows, columns = part.shape
        blocks = (-(-rows // self._blocks.rows), -(-columns // self._blocks.columns))
        return (
            StoredTensor(part.name, ("F8_E4M3",), (part.shape,)),
            StoredTensor(part.name + _SCALES, FLOAT_TYPES, (blocks,)),
        )

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None) -> None:
        """Writes a weight, or one part of the weight, to ``out`` as elements of ``dtype``.

        Raises CheckpointError for a stored NaN or a scale that is not finite. Raises OverflowError if a value does not
        fit ``dtype``, and FloatingPointError if a value does not fit float32.
        """
        codes, scales = self._codes(name), self._scales(name)
        cut = cut or TensorCut(codes.shape, Span(0, len(codes)))
        columns = slice(0, codes.shape[1]) if cut.columns is None else cut.columns.slice
        scale_columns = np.arange(columns.start, columns.stop) // self._blocks.columns
        step = max(1, _PIECE_ELEMENTS // max(1, len(scale_columns)))
        for row in range(cut.rows.start, cut.rows.stop, step):
            end = min(row + step, cut.rows.stop)
            values = _VALUES[codes[row:end, columns]]
            if np.isnan(values).any():
                raise CheckpointError(f"{self._files.where(name)}: tensor {name} holds a value that is not a number")
            with np.errstate(over="raise"):
                values *= scales[np.arange(row, end) // self._blocks.rows][:, scale_columns]
            out[row - cut.rows.start : end - cut.rows.start] = from_float32(values, dtype)
        self._files.count(out.size + scales.nbytes)
        del codes
        self._files.release(name)

    def _codes(self, name: str) -> npt.NDArray[np.uint8]:
        found = self._files.read_optional(name)
        assert found is not None, "the checkpoint has been checked for required tensors"
        return found[0]

    def _scales(self, name: str) -> npt.NDArray[np.float32]:
        found = self._files.read_optional(name + _SCALES)
        assert found is not None, "the checkpoint has been checked for required tensors"
        scales = to_float32(found[0], FLOAT_NAMES[found[1]])
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{self._files.where(name)}: tensor {name}{_SCALES} holds a value that is not finite")
        return scales
