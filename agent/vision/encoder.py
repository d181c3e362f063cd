"""The encoder of Idefics3 and SmolVLM: SigLIP (Zhai et al., arXiv:2303.15343), then pixel shuffle and a projection.

The encoder computes one tile at a time, always in the same order. So the output for a tile depends neither on other
tiles nor on the number of threads (``agent.vision.arithmetic``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.vision.arithmetic import PIECE, Floats, Products, exponentials, normalised
from agent.weights.storage import Array, to_float32
from llm_serving.model.vision import ImageProcessing, VisionShape


class Encoder:
    """Turns the pixels of a tile into the vectors that replace the embeddings of the tile's image tokens."""

    def __init__(
        self,
        vision: VisionShape,
        processing: ImageProcessing,
        text_hidden: int,
        dtype: str,
        weights: Mapping[str, Array],
    ) -> None:
        """``weights`` are the parameters of ``agent.vision.names.vision_specs``. Weights of linear layers are packed.
        """
        self._vision = vision
        self._text_hidden = text_hidden
        self._weights = weights
        self._products = Products(dtype)
        self._processing = processing
        self._patch_weight = self._products.packed(
            to_float32(weights["patches.weight"], dtype).reshape(vision.hidden_size, vision.patch_inputs)
        )
        self._positions = weights["positions"][_position_ids(vision.patches_per_side)]

    def rows(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Returns one vector for each image token of a tile, [tile_rows, text hidden size].

        ``pixels`` are [height, width, 3].
        """
        vision = self._vision
        x = self._embedded(self.normalised(pixels))
        for layer in range(vision.num_layers):
            x += self._attention(self._norm(x, f"{layer}.norm1"), layer)
            hidden = self._linear(self._norm(x, f"{layer}.norm2"), f"{layer}.up", vision.intermediate_size)
            x += self._linear(_gelu(hidden), f"{layer}.down", vision.hidden_size)
        return self._linear(self._shuffled(self._norm(x, "norm")), "connector", self._text_hidden)

    def normalised(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Returns the pixels [height, width, 3] as the encoder's input values."""
        return normalised(pixels, self._processing)

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
        mixed = np.empty((len(x), hidden), np.float32)
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            query, key, value = (qkv[:, begin : begin + hidden][:, columns] for begin in (0, hidden, 2 * hidden))
            scores = products.run(query, products.packed(key), len(x))
            sums = exponentials(scores)
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
        """Joins each square of patches to one row. This is the inverse of pixel shuffle (Shi et al., arXiv:1609.05158).
        """
        side, factor, hidden = self._vision.patches_per_side, self._vision.scale_factor, self._vision.hidden_size
        grid = x.reshape(side // factor, factor, side // factor, factor, hidden)
        return grid.transpose(0, 2, 1, 3, 4).reshape(-1, self._vision.connector_inputs)


def _gelu(values: Floats) -> Floats:
    """Replaces each value by its GELU, in the tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415). Returns the
    same array.
    """
    flat = values.reshape(-1)
    scratch = np.empty(min(PIECE, flat.size), np.float32)
    for start in range(0, flat.size, PIECE):
        x = flat[start : start + PIECE]
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
    """Returns, for each patch, the index of its position embedding, with the rounding errors of the library
    transformers.

    That library divides positions in float32. So a patch may get the embedding of the position before its own.
    """
    step = np.float32(1) / np.float32(side)
    boundaries = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    places = np.minimum(np.arange(side, dtype=np.float32) * step, np.float32(1 - 1e-6))
    buckets = np.searchsorted(boundaries, places, side="right")
    return (buckets[:, None] * side + buckets[None, :]).reshape(-1)
