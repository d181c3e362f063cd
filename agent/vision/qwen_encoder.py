"""The encoder of Qwen2.5-VL (Bai et al., arXiv:2502.13923, section 2.1.1), and the merger that joins its patches.

In most layers, a patch attends only to the patches of its window. Queries and keys are rotated by the row and the
column of their patch in the image. A tile is a whole image. The merger joins a square of neighbouring patches to one
output vector, and the patches of a square follow each other. The encoder computes one tile at a time, always in the
same order. So its outputs depend neither on other tiles nor on the number of threads (``agent.vision.arithmetic``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.vision.arithmetic import PIECE, Floats, Products, exponentials, normalised
from agent.weights.storage import Array, to_float32
from llm_serving.model.vision import QUERY_ROWS, ImageProcessing, VisionShape

Numbers = npt.NDArray[np.int64]

_THETA = 10_000.0
"""Base of the rotary frequencies of patches."""
_ERF = (
    (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
     -2.95459980854025e-03, -1.60960333262415e-02),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02),
)  # fmt: skip
"""Numerator and denominator of erf(x) / x as polynomials of x^2 for -4 <= x <= 4, highest power first (from Eigen)."""


class QwenEncoder:
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
        assert vision.windows is not None, "the encoder of Qwen2.5-VL has windows"
        self._vision, self._windows = vision, vision.windows
        self._processing = processing
        self._text_hidden = text_hidden
        self._weights = weights
        self._products = Products(dtype)
        self._patch_weight = self._products.packed(
            to_float32(weights["patches.weight"], dtype).reshape(vision.hidden_size, vision.patch_inputs)
        )

    def rows(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Returns one vector for each image token of a tile, [tokens, text hidden size].

        ``pixels`` are [height, width, 3].
        """
        vision = self._vision
        rows, columns = (length // vision.row_edge for length in pixels.shape[:2])
        places = patch_places(rows, columns, vision.scale_factor)
        rotary = rotary_angles(places, vision.hidden_size // vision.num_heads)
        windows = window_patches(rows, columns, self._windows.size, vision.scale_factor**2)
        whole = [np.arange(len(places))]
        x = self._products.run(self.patches(pixels), self._patch_weight, vision.hidden_size)
        for layer in range(vision.num_layers):
            seen = whole if layer in self._windows.full_layers else windows
            x += self._attention(self._norm(x, f"{layer}.norm1"), layer, seen, rotary)
            x += self._mlp(self._norm(x, f"{layer}.norm2"), layer)
        joined = self._norm(x, "norm").reshape(rows * columns, vision.connector_inputs)
        hidden = _gelu(self._linear(joined, "join", vision.connector_inputs))
        return self._linear(hidden, "connector", self._text_hidden)

    def patches(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Returns the input values of each patch [patches, 3 x frames x patch size^2].

        The patches of a square, which the merger joins to one output vector, follow each other. The squares come in
        order of rows, then columns.
        """
        size, scale, frames = self._vision.patch_size, self._vision.scale_factor, self._windows.frames
        rows, columns = (length // self._vision.row_edge for length in pixels.shape[:2])
        grid = normalised(pixels, self._processing).reshape(rows, scale, size, columns, scale, size, 3)
        values = grid.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, size * size)
        return np.repeat(values, frames, axis=2).reshape(len(values), -1)

    def _attention(self, x: Floats, layer: int, seen: Sequence[Numbers], rotary: tuple[Floats, Floats]) -> Floats:
        """Returns the result of attention. Each entry of ``seen`` lists patches that attend to each other."""
        vision, products = self._vision, self._products
        hidden, heads = vision.hidden_size, vision.num_heads
        size = hidden // heads
        qkv = self._linear(x, f"{layer}.qkv", 3 * hidden).reshape(len(x), 3, heads, size)
        for part in range(2):
            rotate(qkv[:, part], *rotary)
        qkv[:, 0] *= np.float32(size**-0.5)
        mixed = np.empty((len(x), heads, size), np.float32)
        for patches in seen:
            inside = qkv[patches]
            for head in range(heads):
                query, key, value = (inside[:, part, head] for part in range(3))
                keys, values = products.packed(key), products.packed(value.T)
                for first in range(0, len(patches), QUERY_ROWS):
                    scores = products.run(query[first : first + QUERY_ROWS], keys, len(patches))
                    sums = exponentials(scores)
                    mixed[patches[first : first + QUERY_ROWS], head] = products.run(scores, values, size) / sums
        return self._linear(mixed.reshape(len(x), hidden), f"{layer}.output", hidden)

    def _mlp(self, x: Floats, layer: int) -> Floats:
        inner = self._vision.intermediate_size
        both = self._linear(x, f"{layer}.gate_up", 2 * inner)
        gate, up = both[:, :inner], both[:, inner:]
        with np.errstate(over="ignore"):  # if exp(-gate) becomes infinite, the quotient is 0, as it should be
            hidden = gate / (np.float32(1) + np.exp(-gate))
        hidden *= up
        return self._linear(hidden, f"{layer}.down", self._vision.hidden_size)

    def _linear(self, x: Floats, name: str, outputs: int) -> Floats:
        return self._products.run(x, self._weights[name], outputs)

    def _norm(self, x: Floats, name: str) -> Floats:
        """Returns the RMSNorm of each row."""
        scale = np.square(x).mean(axis=1, keepdims=True)
        scale += np.float32(self._vision.layer_norm_eps)
        normed: Floats = x / np.sqrt(scale)
        normed *= self._weights[f"{name}.weight"]
        return normed


def patch_places(rows: int, columns: int, scale: int) -> Numbers:
    """Returns the row and the column of each patch in the tile [patches, 2].

    ``rows`` and ``columns`` count squares of ``scale`` x ``scale`` patches. The patches of a square follow each other.
    """
    grid = np.indices((rows, scale, columns, scale)).transpose(0, 1, 3, 2, 4)
    places = np.stack([grid[0] * scale + grid[1], grid[2] * scale + grid[3]], axis=-1)
    found: Numbers = places.reshape(-1, 2)
    return found


def rotary_angles(places: Numbers, size: int) -> tuple[Floats, Floats]:
    """Returns the cosines and sines of each patch, both [patches, size / 2], for heads of ``size`` elements.

    ``places`` [patches, 2] has the row and the column of each patch. In the results, the first half of the columns
    belongs to the patch's row, and the second half belongs to the patch's column.
    """
    exponents = np.arange(0, size // 2, 2, dtype=np.float32) / np.float32(size // 2)
    frequencies = np.float32(1) / np.power(_THETA, exponents.astype(np.float64)).astype(np.float32)
    angles = (places.astype(np.float32)[:, :, None] * frequencies).reshape(len(places), -1).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    """Rotates the pairs of elements (i, i + size / 2) of each head in place. ``x`` is [patches, heads, size]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].copy(), x[..., half:].copy()
    cos, sin = cos[:, None], sin[:, None]
    x[..., :half] = first * cos - second * sin
    x[..., half:] = second * cos + first * sin


def window_patches(rows: int, columns: int, size: int, joined: int) -> list[Numbers]:
    """Returns, for each window, the indices of its patches. Windows at the right and at the bottom may be smaller.

    The tile has ``rows`` x ``columns`` squares, and each square has ``joined`` patches. A window has ``size`` x
    ``size`` squares.
    """
    squares = np.arange(rows * columns).reshape(rows, columns)
    windows = (
        squares[row : row + size, column : column + size].reshape(-1)
        for row in range(0, rows, size)
        for column in range(0, columns, size)
    )
    return [(window[:, None] * joined + np.arange(joined)).reshape(-1) for window in windows]


def _gelu(values: Floats) -> Floats:
    """Replaces each value by its GELU, x * (1 + erf(x / sqrt 2)) / 2. Returns the values."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, PIECE):
        x = flat[start : start + PIECE]
        x *= np.float32(0.5) * (np.float32(1) + erf(x * np.float32(0.5**0.5)))
    return values


def erf(values: Floats) -> Floats:
    """Returns the error function of each value, with an error of at most 5e-7."""
    x = np.clip(values, np.float32(-4), np.float32(4))
    square = np.square(x)
    above, below = (_polynomial(square, coefficients) for coefficients in _ERF)
    result: Floats = x * above / below
    return result


def _polynomial(x: Floats, coefficients: Sequence[float]) -> Floats:
    result: Any = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += np.float32(coefficient)
    return result  # type: ignore[no-any-return]
