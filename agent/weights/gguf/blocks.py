"""Converts blocks of GGUF's quantised types to integers with scales, and to floats.

Weights of type Q8_0 are read as int8 and weights of type Q4_0 as int4, without rounding, in groups of 32 inputs. A
block of these types has a float16 scale d and the integers q of 32 consecutive inputs of one output. The value is d * q
for Q8_0 and d * (q - 8) for Q4_0. Byte i of a Q4_0 block has input i in the low four bits and input i + 16 in the high
four bits.

Weights of type MXFP4 are also read as int8 without rounding. A block has the exponent of its scale, then 16 bytes with
4-bit floats in the order of Q4_0 (``agent.weights.mxfp4``).

All other types have smaller groups, minima or code books, which the kernels do not support. The ``gguf`` library
dequantises weights of these types. This module then rounds them to int8 in groups of 32 weights w, with scale =
max|w| / 127. Rounding changes a weight by at most max|w| / 254 of its group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.weights.mxfp4 import DOUBLED, SCHEME, scales_of
from agent.weights.quantized import QuantizedTensor, Scheme
from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import TensorType
from llm_serving.model.number_formats import STORED_FORMATS
from llm_serving.model.quantization import GGUF_FLOATS, GGUF_GROUP

_EXACT = {each.gguf_type: Scheme(each.name, GGUF_GROUP) for each in STORED_FORMATS if each.gguf_type}
_MXFP4 = "MXFP4"
_EXACT[_MXFP4] = SCHEME
_ROUNDED = Scheme("int8", GGUF_GROUP)
_SCALE_BYTES = 2
"""Size of the float16 scale at the start of a block, in bytes."""
_PIECE_ELEMENTS = 1 << 20
"""Approximate number of elements that are converted at a time."""

Bytes = npt.NDArray[np.uint8]


def scheme_of(types: set[str]) -> Scheme | None:
    """Returns the integer format in which a weight is read, or None if all its tensors are floats.

    ``types`` are the GGUF types of the tensors that are joined to the weight.
    """
    if types <= GGUF_FLOATS.keys():
        return None
    return _EXACT.get(next(iter(types)), _ROUNDED) if len(types) == 1 else _ROUNDED


def to_integers(blocks: Bytes, kind: TensorType, scheme: Scheme) -> QuantizedTensor:
    """Returns the integers and scales of a tensor in the format ``scheme``.

    If the type ``kind`` cannot be converted to this format exactly, the tensor is dequantised and rounded. ``blocks``
    are the tensor's bytes, uint8 [rows, bytes of a row]. Raises CheckpointError if a scale is not finite.
    """
    if kind.name == _MXFP4:
        return _of_floats(blocks, kind)
    if _EXACT.get(kind.name) == scheme:
        return _unpacked(blocks, kind, scheme)
    rows, depth = len(blocks), blocks.shape[1] // kind.block_bytes * kind.block_size
    values = np.empty((rows, depth), np.int8)
    scales = np.empty((rows, depth // GGUF_GROUP), np.float32)
    step = max(1, _PIECE_ELEMENTS // depth)
    for begin in range(0, rows, step):
        piece = slice(begin, begin + step)
        groups = to_floats(blocks[piece], kind).reshape(-1, depth // GGUF_GROUP, GGUF_GROUP)
        _round(groups, values[piece].reshape(groups.shape), scales[piece])
    return QuantizedTensor(scheme, values, scales)


def to_floats(blocks: Bytes, kind: TensorType) -> npt.NDArray[np.float32]:
    """Dequantises a tensor: uint8 [rows, bytes of a row] -> float32 [rows, depth].

    Raises CheckpointError if a value is not finite.
    """
    from gguf import GGMLQuantizationType, dequantize

    if kind.name == _MXFP4:
        # The gguf library does not recognise the exponent byte that stands for NaN. Therefore it is not used for MXFP4.
        return _of_floats(blocks, kind).dequantise_rows(0, len(blocks))
    with np.errstate(all="ignore"):
        values = dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType[kind.name])
    floats: npt.NDArray[np.float32] = np.asarray(values, np.float32)
    if not np.isfinite(floats).all():
        raise CheckpointError(f"a scale of type {kind.name} is not finite")
    return floats


def _round(groups: npt.NDArray[np.float32], values: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]) -> None:
    """Quantises ``groups``, float32 [rows, groups, 32], to int8. Writes the integers to ``values``.

    Writes the scale of each group to ``scales`` [rows, groups]. Overwrites ``groups``.
    """
    np.divide(np.abs(groups).max(axis=2), np.float32(127), out=scales)
    divisors = np.where(scales > 0, scales, np.float32(1))
    np.divide(groups, divisors[:, :, None], out=groups)
    values[...] = np.rint(groups, out=groups)


def _unpacked(blocks: Bytes, kind: TensorType, scheme: Scheme) -> QuantizedTensor:
    parts = blocks.reshape(len(blocks), -1, kind.block_bytes)
    scales = np.ascontiguousarray(parts[:, :, :_SCALE_BYTES]).view("<f2")[:, :, 0].astype(np.float32)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"a scale of type {kind.name} is not finite")
    packed = parts[:, :, _SCALE_BYTES:]
    values = np.array(packed) if scheme.weights.bits == 8 else _halves(packed)
    return QuantizedTensor(scheme, values.reshape(len(blocks), -1).view(scheme.weights.storage), scales)


def _of_floats(blocks: Bytes, kind: TensorType) -> QuantizedTensor:
    """Reads a tensor of type MXFP4 as int8 integers with scales.

    The 4-bit floats are multiples of 0.5, so an integer is twice the float, and the scale is halved.
    """
    parts = blocks.reshape(len(blocks), -1, kind.block_bytes)
    values = DOUBLED[_halves(parts[:, :, 1:])].reshape(len(blocks), -1)
    return QuantizedTensor(SCHEME, values, scales_of(parts[:, :, 0]))


def _halves(packed: Bytes) -> Bytes:
    """Unpacks 4-bit numbers: uint8 [rows, blocks, 16] -> uint8 [rows, blocks, 32].

    A block of the result has first the numbers from the low halves of its bytes, then the numbers from the high halves.
    """
    values = np.empty((*packed.shape[:2], GGUF_GROUP), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, :, : GGUF_GROUP // 2])
    np.right_shift(packed, 4, out=values[:, :, GGUF_GROUP // 2 :])
    return values
