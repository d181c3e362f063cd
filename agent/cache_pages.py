"""Makes the system allocate the memory pages of the KV cache.

The first 64 MiB get their pages during the start, and the remaining pages are allocated while the agent serves.

A system takes 0.2 to 2 seconds to allocate 1 GiB, so a start that allocates a large cache would take long. The server
uses blocks with low numbers first, so these blocks get their pages first. If a step uses a block without pages, the
step waits until the system has allocated them.

After the start, the device thread itself allocates the pages, between two messages. A second thread would compete with
the step for cores, for memory bandwidth and for Python's global lock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from agent.weights.storage import Array, file_huge_page_bytes, make_resident, populate
from llm_serving.planning.machine import Machine

logger = logging.getLogger("agent.cache_pages")

START_BYTES = 64 << 20
"""Size of the first part of the cache in bytes. The start waits until this part has pages."""
IDLE_S = 0.02
"""If no message arrives for this number of seconds, the agent counts as idle. The pause between two decode steps is
shorter.
"""
BUSY_SHARE = 0.02
"""Maximum fraction of the time for which a busy agent allocates pages between its steps."""
_PIECE_BYTES = 2 << 20
"""Number of bytes whose pages one call allocates. A step that arrives during the call waits for the end of the call."""


class CachePages:
    """Allocates the memory pages of the arrays that hold the KV cache.

    ``arrays`` come from ``future_zeros``, so they have no pages yet.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        flat = [array.reshape(-1).view(np.uint8) for array in arrays]
        size = max((each.size for each in flat), default=0)
        starts = range(0, size, _PIECE_BYTES)
        pieces = [each[at : at + _PIECE_BYTES] for at in starts for each in flat if at < each.size]
        first = -(-START_BYTES // _PIECE_BYTES)
        self._first, self._rest = pieces[:first], pieces[first:]

    def allocate_first(self) -> None:
        """Allocates the first ``START_BYTES`` of the cache on all cores and waits for the end.

        No other thread may write to the arrays during this call.
        """
        _allocate(self._first)

    def take_rest(self) -> list[Array]:
        """Returns the parts of the cache that ``allocate_first`` did not allocate, each of at most 2 MiB.

        The caller must allocate their pages.
        """
        pieces, self._rest = self._rest, []
        return pieces


class LaterPages:
    """Allocates the pages that the cache lacks after the start, 2 MiB at a time. Only the device thread may call these
    methods, and only between two steps.

    The device thread waits ``wait_s`` seconds for a message. If none arrives, it calls ``allocate_idle``. After each
    message, it calls ``allocate_busy``. When all pages are allocated, ``wait_s`` is None, and no call is necessary.
    """

    def __init__(self, pieces: Sequence[Array] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._pieces = deque(pieces)
        self._clock = clock
        self._due = clock()
        """Earliest time at which ``allocate_busy`` allocates the next 2 MiB."""
        self._num_failed = 0
        self.wait_s: float | None = IDLE_S if self._pieces else None

    @classmethod
    def of(cls, caches: Sequence[CachePages]) -> LaterPages:
        """Returns the object that allocates all pages of ``caches`` that have not been allocated at the start.

        Call this method when the agent is ready, before its first step. If the free memory may be too small, this
        method allocates these pages itself before it returns. Then a lack of memory makes the start fail, and not a
        later step.
        """
        pieces = [piece for cache in caches for piece in cache.take_rest()]
        num_bytes = sum(piece.size for piece in pieces)
        # Linux counts the pages of the mapped weight file as available memory, because it can drop them and read them
        # again. The agent needs these pages in memory, so they are subtracted.
        later = cls(pieces)
        if not pieces:
            return later
        is_safe = num_bytes <= Machine.detect().available_bytes - file_huge_page_bytes()
        if not (is_safe and populate(pieces[0], write=True)):
            later.allocate_all()
        return later

    def allocate_idle(self) -> None:
        """Allocates the next 2 MiB while the agent is idle. Sets ``wait_s`` to 0, so that the next call may follow
        immediately.
        """
        self._allocate_piece()
        if self.wait_s is not None:
            self.wait_s = 0.0

    def allocate_all(self) -> None:
        """Allocates all pages on all cores and waits for the end. No step may run meanwhile."""
        _allocate(self._pieces)
        self._pieces.clear()
        self.wait_s = None

    def allocate_busy(self) -> None:
        """Allocates the next 2 MiB, unless this would take more than ``BUSY_SHARE`` of the time since the last
        allocation.

        So the cache gets its pages even if the agent is never idle.
        """
        self.wait_s = IDLE_S
        if self._clock() >= self._due:
            self._allocate_piece()

    def _allocate_piece(self) -> None:
        began = self._clock()
        self._num_failed += not populate(self._pieces.popleft(), write=True)
        ended = self._clock()
        self._due = ended + (ended - began) / BUSY_SHARE
        if not self._pieces:
            self.wait_s = None
            if self._num_failed:
                size = self._num_failed * _PIECE_BYTES >> 20
                logger.warning("%d MiB of the KV cache get their memory when they are used", size)


def _allocate(pieces: Iterable[Array]) -> None:
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(make_resident, pieces))
