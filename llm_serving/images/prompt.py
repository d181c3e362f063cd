"""The tokens of images in a prompt, as the processors of Idefics3 and SmolVLM write them.

A chat template writes ``<image>`` for each image. This text is replaced by the tokens of the image's tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from llm_serving.errors import RequestError
from llm_serving.images.pool import Hold
from llm_serving.ipc.tiles import PromptTile

if TYPE_CHECKING:
    from llm_serving.images.tiling import Tiles

@dataclass(frozen=True, slots=True)
class PromptImages:
    """The tiles of a prompt's images, and the hold that keeps their places."""

    tiles: tuple[PromptTile, ...]
    hold: Hold

    def salt(self, salt: bytes) -> bytes:
        """Return the salt of the prefix cache for a request with these images.

        Only requests with the same ``salt`` and the same tiles in the same order share blocks.
        """
        digests = b"".join(tile.digest for tile in self.tiles)
        return blake2b(digests + salt, digest_size=16, person=b"llm-image-salt").digest()


IMAGE = "<image>"
"""The text that a chat template writes for an image, and the token of each row of a tile."""
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


def image_text(tiles: Tiles, rows: int) -> str:
    """Return the text of the tokens of an image. ``rows`` is the number of tokens of a tile."""
    whole = f"{_AROUND}{_WHOLE}{IMAGE * rows}{_AROUND}"
    if not tiles.num_rows:
        return whole
    lines = (
        "".join(f"{_AROUND}<row_{row}_col_{column}>{IMAGE * rows}" for column in range(1, tiles.num_columns + 1)) + "\n"
        for row in range(1, tiles.num_rows + 1)
    )
    return "".join(lines) + "\n" + whole


def expanded(text: str, images: Sequence[Tiles], rows: int) -> str:
    """Return a prompt with the tokens of its images. Raises RequestError if it names another number of images.

    The text of a message may contain ``<image>``, too. The prompt then names too many images.
    """
    pieces = text.split(IMAGE)
    if len(pieces) != len(images) + 1:
        raise RequestError(
            f"The prompt names {len(pieces) - 1} images ({IMAGE}), and the messages have {len(images)}; the text of a "
            f"message must not contain {IMAGE}.",
            param="messages",
            code="invalid_value",
        )
    texts = [*(image_text(tiles, rows) for tiles in images), ""]
    return "".join(piece + image for piece, image in zip(pieces, texts, strict=True))


def tile_positions(token_ids: Sequence[int], image_token: int, num_tiles: int, rows: int) -> list[int]:
    """Return the position of the first token of each tile. Raises RequestError unless each tile has ``rows`` tokens."""
    positions = [position for position, token in enumerate(token_ids) if token == image_token]
    begins = positions[::rows]
    expected = [position for begin in begins for position in range(begin, begin + rows)]
    if len(positions) != num_tiles * rows or positions != expected:
        raise RequestError(
            f"The prompt has {len(positions)} image tokens in its text; {num_tiles} tiles of images have "
            f"{num_tiles * rows}. The text of a message must not contain special tokens of images.",
            param="messages",
            code="invalid_value",
        )
    return begins


def placed_tiles(begins: Sequence[int], rows: int, hold: Hold) -> tuple[PromptTile, ...]:
    """Return the tiles of a prompt, whose tokens begin at the positions ``begins``, with their places."""
    triples = zip(begins, hold.places, hold.digests, strict=True)
    return tuple(PromptTile(begin, rows, place, digest) for begin, place, digest in triples)
