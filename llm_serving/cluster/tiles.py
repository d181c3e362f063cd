"""Sends the tiles of images to a node before the steps that read them."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.cluster import messages as link
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tile_memory import TileMemory
from llm_serving.ipc.tiles import read_tiles


class TileSender:
    """Copies tiles of images from the server's shared memory to the shared memory of a node. A tile has the same offset
    in both memories.

    ``send`` sends a frame to the node. A tile is sent again only if another tile has replaced it in the meantime. The
    agents check the digest of the pixels that they read.
    """

    def __init__(self, memory: TileMemory, send: Callable[[bytes], None]) -> None:
        self._memory = memory
        self._send = send
        self._sent: dict[int, bytes] = {}
        """The digest of the tile that the node has in each place."""

    def send_tiles(self, slot: StepSlot) -> None:
        """Sends the tiles of the step in ``slot`` that the node does not have yet."""
        for tile in read_tiles(slot.tiles, slot.num_tiles):
            if self._sent.get(tile.place) == tile.digest:
                continue
            pixels = self._memory.pixels[tile.place].reshape(-1).data
            num_bytes = tile.height * tile.width * 3
            for begin in range(0, num_bytes, link.PART_BYTES):
                data = bytes(pixels[begin : min(begin + link.PART_BYTES, num_bytes)])
                self._send(link.control(link.TilePart(tile.place, begin, data)))
            self._sent[tile.place] = tile.digest
