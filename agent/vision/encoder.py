"""The encoder of Idefics3 and SmolVLM: SigLIP (Zhai et al., arXiv:2303.15343), then pixel shuffle and a projection.

It computes one tile at a time, always in the same order. So the rows of a tile depend neither on other tiles nor on the
number of threads. The kernels of the fused operators compute all matrix products. They round the inputs of each product
to ``model_dtype`` and add in float32. Everything between the products is float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels import Argument, call_operator
from agent.kernels.packing import pack_weight, packed_weight_bytes, weight_blob
from agent.weights.storage import Array, allocate, to_float32
from llm_serving.model.vision import ImageProcessing, VisionShape

Floats = npt.NDArray[np.float32]

_PIECE = 1 << 15
"""Number of values that NumPy computes at a time, so that intermediate results stay in the processor's cache."""


class Encoder:
    """Turns the pixels of a tile into the rows that replace the embeddings of its tokens."""

    def __init__(
        self,
        vision: VisionShape,
        processing: ImageProcessing,
        text_hidden: int,
        dtype: str,
        weights: Mapping[str, Array],
    ) -> None:
        """``weights`` are the parameters of ``agent.vision.names.vision_specs``; those of linear layers are packed."""
        self._vision = vision
        self._text_hidden = text_hidden
        self._weights = weights
        self._products = Products(dtype)
        self._scale = np.float32(processing.rescale_factor)
        self._mean = np.array(processing.mean, np.float32)
        self._std = np.array(processing.std, np.float32)
        self._patch_weight = self._products.packed(
            to_float32(weights["patches.weight"], dtype).reshape(vision.hidden_size, vision.patch_inputs)
        )
        self._positions = weights["positions"][_position_ids(vision.patches_per_side)]

    def rows(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Returns the rows [tile_rows, text hidden size] of a tile. ``pixels`` are [height, width, 3]."""
        vision = self._vision
        x = self._embedded(self.normalised(pixels))
        for layer in range(vision.num_layers):
            x += self._attention(self._norm(x, f"{layer}.norm1"), layer)
            hidden = self._linear(self._norm(x, f"{layer}.norm2"), f"{layer}.up", vision.intermediate_size)
            x += self._linear(_gelu(hidden), f"{layer}.down", vision.hidden_size)
        return self._linear(self._shuffled(self._norm(x, "norm")), "connector", self._text_hidden)

    def normalised(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Returns the pixels [height, width, 3] as the encoder's input values."""
        values: Floats = (pixels.astype(np.float32) * self._scale - self._mean) / self._std
        return values

    def _embedded(self, image: Floats) -> Floats:
        """Returns the embedding of each patch [patches, hidden size], row by row of the image."""
        side, size = self._vision.patches_per_side, self._vision.patch_size
        patches = image.reshape(side, size, side, size, 3).transpose(0, 2, 4, 1, 3)
        x = self._products.run(patches.reshape(side * side, -1), self._patch_weight, self._vision.hidden_size)
        x += self._weights["patches.bias"]
        x += self._positions
        return x

    def _attention(self, x: Floats, layer: int) -> Floats:
        """Returns the result of attention in which each patch attends to all patches."""
        vision, products = self._vision, self._products
        hidden, heads = vision.hidden_size, vision.num_heads
        size = hidden // heads
        qkv = self._linear(x, f"{layer}.qkv", 3 * hidden)
        qkv[:, :hidden] *= np.float32(size**-0.5)
        mixed = np.empty((vision.num_patches, hidden), np.float32)
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            query, key, value = (qkv[:, begin : begin + hidden][:, columns] for begin in (0, hidden, 2 * hidden))
            scores = products.run(query, products.packed(key), vision.num_patches)
            sums = _exponentials(scores)
            mixed[:, columns] = products.run(scores, products.packed(value.T), size) / sums
        return self._linear(mixed, f"{layer}.output", hidden)

    def _linear(self, x: Floats, name: str, outputs: int) -> Floats:
        return self._products.run(x, self._weights[name], outputs)

    def _norm(self, x: Floats, name: str) -> Floats:
        """Returns the layer norm of each row."""
        centred: Floats = x - x.mean(axis=1, keepdims=True)
        scale = np.square(centred).mean(axis=1, keepdims=True)
        scale += np.float32(self._vision.layer_norm_eps)
        centred /= np.sqrt(scale)
        centred *= self._weights[f"{name}.weight"]
        centred += self._weights[f"{name}.bias"]
        return centred

    def _shuffled(self, x: Floats) -> Floats:
        """Joins squares of patches into rows: pixel shuffle (Shi et al., arXiv:1609.05158) in the other direction."""
        side, factor, hidden = self._vision.patches_per_side, self._vision.scale_factor, self._vision.hidden_size
        grid = x.reshape(side // factor, factor, side // factor, factor, hidden)
        return grid.transpose(0, 2, 1, 3, 4).reshape(-1, self._vision.connector_inputs)


class Products:
    """Matrix products by the kernels, whose inputs are rounded to ``dtype``."""

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
    """Returns finite values rounded to nearest in the storage of ``dtype``.

    A value beyond the largest of the type becomes infinity, as in the model's own layers.
    """
    if dtype == "bfloat16":
        return _bfloat16(values)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(np.float16 if dtype == "float16" else np.float32, copy=False)
    return converted


def _bfloat16(values: Floats) -> Array:
    """Returns values rounded to nearest, ties to even, as the bits of bfloat16."""
    bits, out = values.reshape(-1).view(np.uint32), np.empty(values.size, np.uint16)
    scratch = np.empty(min(_PIECE, values.size), np.uint32)
    for start in range(0, values.size, _PIECE):
        piece = bits[start : start + _PIECE]
        nearest = scratch[: piece.size]
        np.right_shift(piece, np.uint32(16), out=nearest)
        nearest &= np.uint32(1)
        nearest += np.uint32(0x7FFF)
        nearest += piece
        out[start : start + _PIECE] = nearest.view(np.uint16)[1::2]  # the upper halves
    return out.reshape(values.shape)


def _exponentials(scores: Floats) -> Floats:
    """Replaces each score by exp(score - largest score of its row). Returns the sum of each row [rows, 1]."""
    sums = np.empty((len(scores), 1), np.float32)
    step = max(1, _PIECE // scores.shape[1])
    for row in range(0, len(scores), step):
        piece = scores[row : row + step]
        piece -= piece.max(axis=1, keepdims=True)
        np.exp(piece, out=piece)
        piece.sum(axis=1, keepdims=True, out=sums[row : row + step])
    return sums


def _gelu(values: Floats) -> Floats:
    """Replaces each value by its GELU in the form with tanh (Hendrycks and Gimpel, arXiv:1606.08415). Returns them."""
    flat = values.reshape(-1)
    scratch = np.empty(min(_PIECE, flat.size), np.float32)
    for start in range(0, flat.size, _PIECE):
        x = flat[start : start + _PIECE]
        inner = np.square(x, out=scratch[: x.size])
        inner *= np.float32(0.044715)
        inner += np.float32(1)
        inner *= x
        inner *= np.float32((2 / np.pi) ** 0.5)
        np.tanh(inner, out=inner)
        inner += np.float32(1)
        x *= inner
        x *= np.float32(0.5)
    return values


def _position_ids(side: int) -> npt.NDArray[Any]:
    """Returns the number of each patch's position embedding. transformers computes it from fractions in float32, which
    can round to the position before.
    """
    step = np.float32(1) / np.float32(side)
    boundaries = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    places = np.minimum(np.arange(side, dtype=np.float32) * step, np.float32(1 - 1e-6))
    buckets = np.searchsorted(boundaries, places, side="right")
    return (buckets[:, None] * side + buckets[None, :]).reshape(-1)
