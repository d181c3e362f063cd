"""The memory with the tiles of images on a node. The server sends a tile before the first step that reads it."""

from __future__ import annotations

import numpy as np

from llm_serving.cluster.messages import TilePart
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.tile_memory import TileLayout, TileMemory


class NodeTiles:
    """The node's copy of the server's tiles. A tile has the same index in the copy as on the server. The node's agents
    map ``memory``.
    """

    def __init__(self, memory: TileMemory) -> None:
        self.memory = memory

    @classmethod
    def of(cls, config: Config) -> NodeTiles | None:
        """Creates the memory. Returns None if the model reads no images. Raises OSError if /dev/shm is too small."""
        layout = TileLayout.of(config)
        return None if layout is None else cls(TileMemory.create(layout))

    def write(self, part: TilePart) -> None:
        """Writes bytes of a tile. Raises ProtocolError if no tile has this index, or if the bytes do not fit."""
        layout = self.memory.layout
        end, tile_bytes = part.begin + len(part.data), layout.tile_pixels * 3
        if part.place >= layout.num_places or end > tile_bytes:
            raise ProtocolError(
                f"the server sent bytes {part.begin} to {end} of tile {part.place}; there are {layout.num_places} "
                f"tiles of at most {tile_bytes} bytes"
            )
        self.memory.pixels[part.place].reshape(-1)[part.begin : end] = np.frombuffer(part.data, np.uint8)

    def unlink(self) -> None:
        """Removes the name of the memory. Call this method when the agents have mapped it."""
        self.memory.unlink()

    def close(self) -> None:
        self.memory.close()
