"""Decodes the file of an image. The format and the size are read from the file's header, and checked before pixels are
decoded.
"""

from __future__ import annotations

import io
import math
import mmap
import warnings

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from llm_serving.config.image_section import ImageConfig
from llm_serving.images.urls import ImageError

KINDS = ("PNG", "JPEG", "WEBP")
"""The supported file formats, by Pillow's names."""
_WEBP_HEADER_BYTES = 30
"""Size of the part of a WebP file that has the image's size."""
_PIXEL_BYTES = {"L": 1, "P": 1, "I;16": 2, "LA": 4, "RGB": 4, "RGBA": 4, "CMYK": 4}
"""Number of bytes of a pixel in Pillow's memory, by the mode of an image."""
MAX_WEBP_PIXELS = 4 * 1024 * 1024
"""Maximum width x height of a WebP. Pillow copies all pixels of a WebP in one call that blocks all other threads. For
this size, the call takes 10 to 14 ms of its thread's processor time (two cores of an AMD EPYC, Zen 4, under load).
"""


def decode(data: bytes, settings: ImageConfig, param: str) -> Image.Image:
    """Returns the decoded image in RGB with 8 bits per channel. ``param`` is the request's field with the image, for
    error texts.

    As in transformers, the image is rotated as its EXIF metadata state, and transparent pixels get a white background.
    Raises ImageError.
    """
    # Pillow allocates buffers for all pixels when it opens a WebP. So the size of a WebP is read and checked first.
    width, height = _webp_size(data)
    _check_pixels(width, height, settings, param)
    _check_webp(width, height, settings, param)
    with warnings.catch_warnings():
        # Pillow warns about images above its own limit and about damaged metadata. These warnings are not needed,
        # because this module has its own limit.
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data), formats=KINDS)
            _check_pixels(*image.size, settings, param)
            if getattr(image, "n_frames", 1) > 1:
                raise ImageError(f"'{param}' is an animation; send one image.", param=param)
            _allocate(image)
            ImageOps.exif_transpose(image, in_place=True)
            image.load()
            return _on_white(image)
        except ImageError:
            raise
        except UnidentifiedImageError:
            problem = f"'{param}' is not an image of a kind that this server reads: {', '.join(KINDS)}."
            raise ImageError(problem, param=param) from None
        except Image.DecompressionBombError as problem:
            raise ImageError(f"'{param}': {problem}", param=param, code="image_too_large") from None
        except Exception as problem:  # Pillow's decoders raise errors of many classes for damaged files
            reason = str(problem)[:200] or type(problem).__name__
            raise ImageError(f"'{param}' is a damaged image: {reason}.", param=param) from None


def _allocate(image: ImageFile.ImageFile) -> None:
    """Allocates the memory for the pixels of an image that has not been decoded yet.

    If Pillow allocated this memory, it would fill it with zeros and block all other threads meanwhile. This takes 36 ms
    for 16 million pixels on a busy machine. This function maps memory that the operating system provides page by page
    while Pillow decodes, which blocks no other thread.
    """
    if image.mode not in _PIXEL_BYTES:
        return
    row_bytes = image.width * _PIXEL_BYTES[image.mode]
    memory = mmap.mmap(-1, row_bytes * image.height, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    core = Image.core  # type: ignore[attr-defined]
    image.im = core.map_buffer(memory, image.size, "raw", 0, (image.mode, row_bytes, 1))


def _on_white(image: Image.Image) -> Image.Image:
    """Returns the image in RGB, with transparent pixels on white. At most two copies of the image are in memory at any
    time.
    """
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image, mask=image)
    return canvas


def _check_pixels(width: int, height: int, settings: ImageConfig, param: str) -> None:
    if width * height > settings.max_pixels:
        raise ImageError(
            f"'{param}' has {width} x {height} = {width * height} pixels; the maximum is {settings.max_pixels} "
            "(image_config.max_pixels). Send a smaller image.",
            param=param,
            code="image_too_large",
        )


def _check_webp(width: int, height: int, settings: ImageConfig, param: str) -> None:
    if width * height > MAX_WEBP_PIXELS:
        scale = math.sqrt(MAX_WEBP_PIXELS / (width * height))
        raise ImageError(
            f"'{param}' is a WebP of {width} x {height} = {width * height} pixels; the maximum of a WebP is "
            f"{MAX_WEBP_PIXELS}, whatever image_config.max_pixels is. Send it as a JPEG or a PNG, whose maximum is "
            f"{settings.max_pixels}, or reduce it to {int(width * scale)} x {int(height * scale)}.",
            param=param,
            code="image_too_large",
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Returns width and height from the header of a WebP file (RFC 9649), or (0, 0) for any other file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < _WEBP_HEADER_BYTES:
        return 0, 0
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
