"""Shared memory with the pixels of tiles: the server writes them, and the agents encode them.

The memory has a fixed number of places, each for one tile: ``uint8`` [pixels, 3], in rows of pixels. A place is in use
while a request needs its tile. The memory keeps its name as long as the server runs, because restarted agents map it
again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llm_serving.ipc.segment import LaidOutSegment

if TYPE_CHECKING:
    from llm_serving.config import Config

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TileLayout:
    """The number of places for tiles, and the number of pixels of the largest tile."""

    num_places: int
    tile_pixels: int

    @classmethod
    def of(cls, config: Config) -> TileLayout | None:
        """Returns the layout for a model. None if the model reads no images."""
        return None if config.tile_pixels == 0 else cls(config.image_config.max_tiles, config.tile_pixels)

    @property
    def num_bytes(self) -> int:
        return self.num_places * self.tile_pixels * 3


class TileMemory(LaidOutSegment[TileLayout]):
    """The mapped places. The server creates and unlinks them; the agents attach to them."""

    KIND = "tile"

    def _make_views(self, mapping: mmap.mmap) -> None:
        layout = self.layout
        shape = (layout.num_places, layout.tile_pixels, 3)
        self.pixels: Pixels = np.ndarray(shape, np.uint8, mapping)
        """The pixels of all places, [places, pixels of the largest tile, 3]."""
