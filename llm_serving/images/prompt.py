"""Inserts the tokens of images into a prompt, as the processors of Idefics3, SmolVLM and Qwen2.5-VL do.

A chat template writes a text for each image, for example ``<image>``. The tokens of the image's tiles replace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from struct import pack
from typing import TYPE_CHECKING

from llm_serving.errors import RequestError
from llm_serving.images.pool import Hold
from llm_serving.ipc.tiles import PromptTile

if TYPE_CHECKING:
    from llm_serving.images.tiling import Tiles
    from llm_serving.model.vision import VisionShape


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The tiles of a prompt's images, and the hold that keeps their places."""

    tiles: tuple[PromptTile, ...]
    hold: Hold

    def salt(self, salt: bytes) -> bytes:
        """Returns the salt of the prefix cache for a request with these images.

        So requests share cached blocks only if they have the same ``salt`` and the same tiles in the same order.
        """
        digests = b"".join(tile.digest + pack("<2i", tile.height, tile.width) for tile in self.tiles)
        return blake2b(digests + salt, digest_size=16, person=b"llm-image-salt").digest()


IMAGE, QWEN_IMAGE = "<image>", "<|image_pad|>"
"""The image tokens of SmolVLM and of Qwen2.5-VL. A chat template writes one image token for each image. ``expanded``
replaces it by one image token for each row (embedding) of the image's tiles.
"""
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


def image_text(tiles: Tiles, vision: VisionShape) -> str:
    """Returns the text that stands for all tokens of an image, with one image token for each row of its tiles."""
    rows = vision.rows_of(tiles.pixels[-1].size // 3)
    if vision.windows is not None:
        return QWEN_IMAGE * rows
    whole = f"{_AROUND}{_WHOLE}{IMAGE * rows}{_AROUND}"
    if not tiles.num_rows:
        return whole
    lines = (
        "".join(f"{_AROUND}<row_{row}_col_{column}>{IMAGE * rows}" for column in range(1, tiles.num_columns + 1)) + "\n"
        for row in range(1, tiles.num_rows + 1)
    )
    return "".join(lines) + "\n" + whole


def expanded(text: str, images: Sequence[Tiles], vision: VisionShape) -> str:
    """Replaces each image token in ``text`` by the tokens of the next image.

    Raises RequestError if ``text`` does not have one image token per image. This happens if a client writes an image
    token in the text of a message.
    """
    image_token = IMAGE if vision.windows is None else QWEN_IMAGE
    pieces = text.split(image_token)
    if len(pieces) != len(images) + 1:
        raise RequestError(
            f"The prompt names {len(pieces) - 1} images ({image_token}), and the messages have {len(images)}; the text "
            f"of a message must not contain {image_token}.",
            param="messages",
            code="invalid_value",
        )
    texts = [*(image_text(tiles, vision) for tiles in images), ""]
    return "".join(piece + image for piece, image in zip(pieces, texts, strict=True))


def tile_positions(token_ids: Sequence[int], image_token: int, rows: Sequence[int]) -> list[int]:
    """Returns the position of the first token of each tile. ``rows`` has the number of tokens of each tile.

    Raises RequestError unless the prompt has exactly the image tokens of the tiles, without gaps within a tile.
    """
    positions = [position for position, token in enumerate(token_ids) if token == image_token]
    firsts = list(accumulate(rows[:-1], initial=0))
    if len(positions) == sum(rows):
        begins = [positions[first] for first in firsts]
        if positions == [position for begin, count in zip(begins, rows, strict=True) for position in
                         range(begin, begin + count)]:  # fmt: skip
            return begins
    raise RequestError(
        f"The prompt has {len(positions)} image tokens in its text; {len(rows)} tiles of images have {sum(rows)}. The "
        "text of a message must not contain special tokens of images.",
        param="messages",
        code="invalid_value",
    )


def placed_tiles(
    begins: Sequence[int], sizes: Sequence[tuple[int, int]], hold: Hold, vision: VisionShape, pixels_per_token: float
) -> tuple[PromptTile, ...]:
    """Returns the tiles of a prompt. ``begins`` has the position of each tile's first token, and ``hold`` the places of
    the tiles in shared memory.

    ``sizes`` has the height and the width of each tile in pixels. The cost of a tile in tokens is its number of pixels
    divided by ``pixels_per_token``. Encoding this number of pixels takes as long as computing one token.
    """
    tiles, shift = [], 0
    for begin, (height, width), place, digest in zip(begins, sizes, hold.places, hold.digests, strict=True):
        rows = vision.rows_of(height * width)
        if vision.windows is not None:
            # The rotary position after an image is the largest row or column number of the image plus one.
            shift += rows - max(height, width) // vision.row_edge
        work = max(1, round(height * width / pixels_per_token))
        tiles.append(PromptTile(begin, rows, place, digest, height, width, work, shift))
    return tuple(tiles)
