"""Shared memory with the pixels of tiles: the server writes them, and the agents encode them.

It has a fixed number of places. Each place has one tile, ``uint8`` [pixels, 3], row by row. A place is in use while any
request has its tile. The memory keeps its name as long as the server runs, because restarted agents map it again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llm_serving.ipc.segment import NamedSegment, map_segment, new_segment

if TYPE_CHECKING:
    from llm_serving.config import Config

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TileLayout:
    """The number of places, and the number of pixels of the largest tile."""

    num_places: int
    tile_pixels: int

    @classmethod
    def of(cls, config: Config) -> TileLayout | None:
        """Returns the layout for a model. None if the model reads no images."""
        return None if config.tile_pixels == 0 else cls(config.image_config.max_tiles, config.tile_pixels)

    @property
    def num_bytes(self) -> int:
        return self.num_places * self.tile_pixels * 3


class TileMemory(NamedSegment):
    """The mapped places. The server creates and unlinks them; the agents attach to them."""

    def __init__(self, name: str, layout: TileLayout, mapping: mmap.mmap) -> None:
        super().__init__(name)
        self.layout = layout
        shape = (layout.num_places, layout.tile_pixels, 3)
        self.pixels: Pixels = np.ndarray(shape, np.uint8, mapping)
        """The pixels of all places, [places, pixels of the largest tile, 3]."""

    @classmethod
    def create(cls, layout: TileLayout) -> TileMemory:
        """Creates a segment with reserved pages. Raises OSError if /dev/shm is too small."""
        with new_segment(layout.num_bytes) as (name, mapping):
            memory = cls(name, layout, mapping)
        memory.has_name = True
        return memory

    @classmethod
    def attach(cls, name: str, layout: TileLayout) -> TileMemory:
        """Maps a segment that the server created. Raises ProtocolError if its name or size is wrong."""
        return cls(name, layout, map_segment(name, layout.num_bytes, "tile"))

    def close(self) -> None:
        """Removes the segment's name. The mapping ends when no view of it is left."""
        self.unlink()
