"""Describes the tiles of images in prompts and in steps. A tile is a square part of an image, or the whole image
resized.

The vision encoder makes one row (a vector) of a tile for each token of the tile. A chunk may end inside a tile, so a
step may need only some rows. TILE_WIDTH integers in the step's slot describe each tile whose rows the step needs:

- the place of the tile's pixels in the shared memory (``tile_memory``),
- the index in the step of the first token that gets a row,
- the index of the tile's row for this token, and how many rows the step needs from there,
- the height and the width of the tile in pixels, and the digest of the pixels.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DIGEST_BYTES = 16
"""Size of the digest of a tile's pixels."""
_FORM = struct.Struct(f"<6i{DIGEST_BYTES}s")
TILE_WIDTH = _FORM.size // 4
"""Number of integers that describe one tile in a step slot."""


@dataclass(frozen=True, slots=True)
class PromptTile:
    """A tile of a prompt: the position of its first token, its number of tokens, the place of its pixels in memory, and
    their digest.
    """

    begin: int
    rows: int
    place: int
    digest: bytes
    height: int = 0
    width: int = 0
    """Height and width of the tile in pixels."""
    cost: int = 0
    """Number of tokens that encoding the tile takes from a step's token budget."""
    shift: int = 0
    """The difference position - rotary position of the tokens after this tile."""

    @property
    def end(self) -> int:
        """The position after the tile's last token."""
        return self.begin + self.rows


@dataclass(frozen=True, slots=True)
class StepTile:
    """A part of a tile in a step: rows ``first .. first + rows - 1``, for the tokens from index ``token`` on."""

    place: int
    token: int
    first: int
    rows: int
    height: int
    width: int
    digest: bytes


def digest_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Returns the digest of a tile's pixels, which must be contiguous.

    If tiles of the same height and width have equal digests, their pixels are equal.
    """
    return blake2b(pixels.data, digest_size=DIGEST_BYTES).digest()


def tiles_between(tiles: Sequence[PromptTile], start: int, end: int, token: int) -> list[StepTile]:
    """Returns the parts of a prompt's tiles that belong to the tokens at the positions ``start .. end - 1``.

    These tokens are one chunk of the prompt. ``token`` is the index of the first one in the step.
    """
    found = []
    for tile in tiles:
        first, last = max(tile.begin, start), min(tile.end, end)
        if first < last:
            numbers = (token + first - start, first - tile.begin, last - first, tile.height, tile.width)
            found.append(StepTile(tile.place, *numbers, tile.digest))
    return found


def write_shifts(column: npt.NDArray[np.int32], tiles: Sequence[PromptTile], start: int) -> None:
    """Writes the shift of each token of a sequence into ``column``, the sequence's part of the field
    ``position_shifts``.

    The shift of a token is its position minus its rotary position. ``start`` is the position of the first token. Tokens
    of a tile have the shift of the token before the tile.
    """
    if not tiles or start >= tiles[-1].end:
        column[:] = tiles[-1].shift if tiles else 0
        return
    column[:] = 0
    for tile in tiles:
        column[max(tile.end - start, 0) :] = tile.shift


def write_tiles(column: npt.NDArray[np.int32], tiles: Sequence[StepTile]) -> None:
    """Writes the tiles of a step into the field ``tiles`` of its slot. The caller must check that they fit."""
    packed = b"".join(
        _FORM.pack(tile.place, tile.token, tile.first, tile.rows, tile.height, tile.width, tile.digest)
        for tile in tiles
    )
    column.view("uint8")[: len(packed)] = memoryview(packed)


def read_tiles(column: npt.NDArray[np.int32], count: int) -> list[StepTile]:
    """Returns the first ``count`` tiles of the field ``tiles`` of a slot. The caller must check their values."""
    return [StepTile(*values) for values in _FORM.iter_unpack(column[: count * TILE_WIDTH].tobytes())]
