"""Cuts an image into tiles by the rules of Idefics3 and SmolVLM (``SmolVLMImageProcessorPil`` in transformers).

The image is resized so that its longer edge is ``longest_edge``. It is resized again so that both edges are multiples
of a tile's edge. Then it is cut into rows and columns of tiles. One more tile has the whole image, reduced to the size
of a tile. A small image has only this tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt
from PIL import Image

from llm_serving.model.vision import MAX_EDGE, ImageProcessing

Pixels = npt.NDArray[np.uint8]

FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one image: first the tiles of its parts, row by row, then the tile of the whole image."""

    num_rows: int
    num_columns: int
    """Number of columns of parts. ``num_rows`` and ``num_columns`` are 0 if there is only the tile of the whole image.
    """
    pixels: tuple[Pixels, ...]
    """The pixels of each tile, ``uint8`` [height, width, 3]."""


def cut(image: Image.Image, processing: ImageProcessing, size: int, *, splits: bool = True) -> Tiles:
    """Returns the tiles of an RGB image. ``size`` is the width and height of a tile, in pixels.

    With ``splits=False``, returns only the tile of the whole image.
    """
    resample = FILTERS[processing.resample]
    image = image.resize(_first_size(*image.size, processing.longest_edge), resample)
    if not (splits and processing.splits):
        return Tiles(0, 0, (_pixels(image.resize((size, size), resample)),))
    width, height = _in_tiles(*image.size, size)
    image = image.resize((width, height), resample)
    if width == size and height == size:
        return Tiles(0, 0, (_pixels(image),))
    whole, pixels = _pixels(image.resize((size, size), resample)), _pixels(image)
    rows, columns = height // size, width // size
    parts = [
        np.ascontiguousarray(pixels[row * size : (row + 1) * size, column * size : (column + 1) * size])
        for row in range(rows)
        for column in range(columns)
    ]
    return Tiles(rows, columns, (*parts, whole))


def _first_size(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns width and height after the first resize. The longer edge becomes ``longest``.

    The other edge becomes an even number that keeps the image's proportion.
    """
    ratio = width / height
    if width >= height:
        width, height = longest, _even(int(longest / ratio))
    else:
        width, height = _even(int(longest * ratio)), longest
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, size: int) -> tuple[int, int]:
    """Returns width and height, rounded up to multiples of ``size``.

    The longer edge is rounded first. The other edge follows from it and the image's proportion, and is then rounded.
    """
    ratio = width / height
    if width >= height:
        width = ceil(width / size) * size
        return width, ceil(int(width / ratio) / size) * size
    height = ceil(height / size) * size
    return ceil(int(height * ratio) / size) * size, height


def _even(number: int) -> int:
    return number + number % 2


def _pixels(image: Image.Image) -> Pixels:
    return np.array(image, np.uint8)
