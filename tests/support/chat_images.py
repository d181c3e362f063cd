"""Makes images, and the parts of chat messages that contain them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from performance.models.vision import sample_image


def png_of(image: Image.Image, kind: str = "PNG") -> bytes:
    """Returns the file of an image."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def sample_png(number: int) -> bytes:
    """Returns the file of ``performance.models.vision.sample_image``."""
    return png_of(Image.fromarray(sample_image(number)))


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url: str, **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def sample_part(number: int, **fields: str) -> dict[str, Any]:
    """Returns a sample image as a part of a message."""
    return image_part(data_url(sample_png(number)), **fields)
