"""Allocates places for the tiles of requests in the memory that the agents read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llm_serving.ipc.tiles import digest_of

Pixels = npt.NDArray[np.uint8]


class TilePlaces(Protocol):
    """The shared memory with the pixels of tiles."""

    @property
    def pixels(self) -> Pixels:
        """The pixels of all places, [places, pixels of the largest tile, 3]."""


class TilesFullError(Exception):
    """Too few places are free for the tiles of a request. The error text states how many are free."""


class TilePool:
    """Allocates the places of tiles. Tiles with equal pixels share a place. Any thread may call the methods."""

    def __init__(self, memory: TilePlaces) -> None:
        self._memory = memory
        self.num_places = len(memory.pixels)
        self._free = list(range(self.num_places))
        self._holds: dict[int, int] = {}
        """Number of holds of each place in use."""
        self._digests: dict[int, bytes] = {}
        self._places: dict[bytes, int] = {}
        # The lock must be reentrant. While a method holds it, Python may free a ``Hold`` in the same thread, and
        # ``Hold.__del__`` takes the lock, too.
        self._lock = threading.RLock()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put(self, tiles: Sequence[Pixels]) -> Hold:
        """Copies tiles into places and returns a hold of these places. Raises TilesFullError if too few places are
        free.
        """
        taken: list[int] = []
        try:
            for pixels in tiles:
                taken.append(self._put(pixels))
        except TilesFullError:
            self._give_back(taken)
            raise TilesFullError(
                f"{len(tiles)} tiles of images do not fit the {self.num_free} free places of {self.num_places} "
                "(image_config.max_tiles)"
            ) from None
        return Hold(self, taken)

    def digest(self, place: int) -> bytes:
        """Returns the digest of the tile in a place that is in use."""
        return self._digests[place]

    def _put(self, pixels: Pixels) -> int:
        digest = digest_of(np.ascontiguousarray(pixels))
        with self._lock:
            place = self._places.get(digest)
            if place is None:
                if not self._free:
                    raise TilesFullError
                place = self._free.pop()
                count = pixels.shape[0] * pixels.shape[1]
                self._memory.pixels[place, :count] = pixels.reshape(count, 3)
                self._places[digest], self._digests[place] = place, digest
                self._holds[place] = 0
            self._holds[place] += 1
            return place

    def _share(self, places: Sequence[int]) -> None:
        with self._lock:
            for place in places:
                self._holds[place] += 1

    def _give_back(self, places: Sequence[int]) -> None:
        with self._lock:
            for place in places:
                self._holds[place] -= 1
                if not self._holds[place]:
                    del self._holds[place], self._places[self._digests.pop(place)]
                    self._free.append(place)


class Hold:
    """Holds the places of some tiles until ``end``, or until nothing refers to this object."""

    def __init__(self, pool: TilePool, places: Sequence[int]) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._has_ended = False
        self.places = tuple(places)
        self.digests = tuple(pool.digest(place) for place in places)

    def again(self) -> Hold:
        """Returns another hold of the places of this hold. Call it only before ``end``."""
        self._pool._share(self.places)
        return Hold(self._pool, self.places)

    def end(self) -> None:
        """Releases the places. May be called several times, by any thread."""
        with self._lock:
            has_ended, self._has_ended = self._has_ended, True
        if not has_ended:
            self._pool._give_back(self.places)

    def __del__(self) -> None:
        self.end()
