"""Resizes an image to one tile of nearly the same proportion, by the rules of Qwen2.5-VL (``smart_resize`` in
transformers).

Width and height become multiples of ``row_edge``: the encoder makes one embedding of each square of this edge. The
number of pixels stays within the model's limits.
"""

from __future__ import annotations

from math import ceil, floor, sqrt

import numpy as np
from PIL import Image

from llm_serving.images.tiling import FILTERS, Tiles
from llm_serving.images.urls import ImageError
from llm_serving.model.vision import MAX_PROPORTION, ImageProcessing, VisionShape

_SMALL_ROWS = 256
"""Maximum number of rows (embeddings) of an image with ``detail: low``."""


def resized(
    image: Image.Image, vision: VisionShape, processing: ImageProcessing, param: str, *, is_small: bool
) -> Tiles:
    """Returns an RGB image as one tile. ``param`` is the request's field with the image, for error texts.

    Raises ImageError if the image is more than MAX_PROPORTION times as wide as high, or as high as wide.
    """
    width, height = image.size
    if max(width, height) > MAX_PROPORTION * min(width, height):
        raise ImageError(
            f"'{param}' has {width} x {height} pixels; the longer edge must be at most {MAX_PROPORTION} times the "
            "shorter one. Cut the image.",
            param=param,
        )
    edge, most = vision.row_edge, processing.max_pixels
    if is_small:
        most = max(min(most, _SMALL_ROWS * edge**2), processing.min_pixels, MAX_PROPORTION * edge**2)
    height, width = resized_edges(height, width, edge, processing.min_pixels, most)
    pixels = np.array(image.resize((width, height), FILTERS[processing.resample]), np.uint8)
    return Tiles(0, 0, (pixels,))


def resized_edges(height: int, width: int, edge: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns height and width as multiples of ``edge`` whose product is within the limits.

    ``max_pixels`` must be at least MAX_PROPORTION x ``edge``^2, so that the shorter edge can be one ``edge``.
    """
    new_height, new_width = round(height / edge) * edge, round(width / edge) * edge
    if new_height * new_width > max_pixels:
        ratio = sqrt(height * width / max_pixels)
        return max(edge, floor(height / ratio / edge) * edge), max(edge, floor(width / ratio / edge) * edge)
    if new_height * new_width < min_pixels:
        ratio = sqrt(min_pixels / (height * width))
        return ceil(height * ratio / edge) * edge, ceil(width * ratio / edge) * edge
    return new_height, new_width
