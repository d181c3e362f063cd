"""The arithmetic of vision encoders. The kernels of the fused operators compute all matrix products.

The kernels round the inputs of each product to ``model_dtype`` and add in float32. All other operations are float32. No
result depends on the number of threads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.kernels import Argument, call_operator
from agent.kernels.packing import pack_weight, packed_weight_bytes, weight_blob
from agent.weights.storage import Array, allocate
from llm_serving.model.vision import ImageProcessing

Floats = npt.NDArray[np.float32]

PIECE = 1 << 15
"""Number of values that NumPy computes at a time, so that intermediate results stay in the processor's cache."""


def normalised(pixels: npt.NDArray[np.uint8], processing: ImageProcessing) -> Floats:
    """Returns the input values of an encoder for pixels [height, width, 3]: rescaled and normalised, in the same shape.
    """
    scale, mean, std = (
        np.array(each, np.float32) for each in (processing.rescale_factor, processing.mean, processing.std)
    )
    values: Floats = (pixels.astype(np.float32) * scale - mean) / std
    return values


class Products:
    """Computes matrix products with the kernels. The kernels round the inputs to ``dtype``."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._counts = np.zeros(4, np.int32)

    def packed(self, weight: Floats) -> Array:
        """Returns a matrix [outputs, inputs] in the packed form of the kernels."""
        values = np.ascontiguousarray(weight)
        blob = weight_blob(packed_weight_bytes(self._dtype, *values.shape))
        pack_weight(self._dtype, values, blob)
        return blob

    def run(self, x: Floats, weight: Array, outputs: int) -> Floats:
        """Returns x [rows, inputs] times a packed weight, float32 [rows, outputs]."""
        rows, width = x.shape
        inputs, out = rounded(np.ascontiguousarray(x), self._dtype), allocate((rows, outputs), "float32")
        self._counts[0] = rows
        call_operator(
            "PackedLinear",
            [
                Argument(inputs.ctypes.data, (rows, width), self._dtype),
                Argument(weight.ctypes.data, weight.shape, "uint8"),
                Argument(self._counts.ctypes.data, self._counts.shape, "int32"),
                Argument(out.ctypes.data, out.shape, "float32"),
            ],
        )
        return out


def rounded(values: Floats, dtype: str) -> Array:
    """Rounds finite values to the nearest numbers of ``dtype``. bfloat16 is returned as uint16.

    A value above the largest number of the type becomes infinity, as in the layers of the text model.
    """
    if dtype == "bfloat16":
        return _bfloat16(values)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(np.float16 if dtype == "float16" else np.float32, copy=False)
    return converted


def _bfloat16(values: Floats) -> Array:
    """Returns values rounded to nearest, ties to even, as the bits of bfloat16."""
    bits, out = values.reshape(-1).view(np.uint32), np.empty(values.size, np.uint16)
    scratch = np.empty(min(PIECE, values.size), np.uint32)
    for start in range(0, values.size, PIECE):
        piece = bits[start : start + PIECE]
        nearest = scratch[: piece.size]
        np.right_shift(piece, np.uint32(16), out=nearest)
        nearest &= np.uint32(1)
        nearest += np.uint32(0x7FFF)
        nearest += piece
        out[start : start + PIECE] = nearest.view(np.uint16)[1::2]  # the upper half of each float32
    return out.reshape(values.shape)


def exponentials(scores: Floats) -> Floats:
    """Replaces each score by exp(score - largest score of its row). Returns the sum of each row [rows, 1]."""
    sums = np.empty((len(scores), 1), np.float32)
    step = max(1, PIECE // scores.shape[1])
    for row in range(0, len(scores), step):
        piece = scores[row : row + step]
        piece -= piece.max(axis=1, keepdims=True)
        np.exp(piece, out=piece)
        piece.sum(axis=1, keepdims=True, out=sums[row : row + step])
    return sums
