"""Makes the system allocate the pages of the KV cache: some during the start, and the rest while the agent serves.

A system takes 0.2 to 2 seconds to allocate 1 GiB. So the agent does not wait until a large cache has all its pages. The
server uses blocks with low numbers first, so these blocks get their pages first. If a step uses a block without pages,
the step waits until the system has allocated them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from agent.weights.storage import Array, file_huge_page_bytes, make_resident, populate
from llm_serving.planning.machine import Machine

logger = logging.getLogger("agent.cache_pages")

START_BYTES = 64 << 20
"""Size of the first part of the cache in bytes. The start waits until this part has pages."""
_PIECE_BYTES = 2 << 20
"""Number of bytes whose pages one call allocates. A call for more bytes would delay the other threads of the process.
"""
_LOWEST_PRIORITY = 19


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
        self._thread: threading.Thread | None = None

    def allocate_first(self) -> None:
        """Allocates the first ``START_BYTES`` of the cache on all cores and waits for the end.

        No other thread may write to the arrays during this call.
        """
        _allocate(self._first)

    def allocate_rest(self) -> None:
        """Starts a thread of the lowest priority that allocates all pages after those of ``allocate_first``.

        Call this method when the agent is ready, before its first step. If the free memory may be too small, the method
        allocates the pages itself before it returns. Then a lack of memory fails the start and not a later step.
        """
        pieces, self._rest = self._rest, []
        num_bytes = sum(piece.size for piece in pieces)
        # Linux counts the pages of the mapped weight file as available memory, because it can drop them and read them
        # again. The agent needs these pages in memory, so they are subtracted.
        is_safe = num_bytes <= Machine.detect().available_bytes - file_huge_page_bytes()
        if not pieces:
            return
        if not is_safe or not populate(pieces[0], write=True):
            _allocate(pieces)
            return
        self._thread = threading.Thread(target=_allocate_slowly, args=(pieces,), name="cache-pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the thread of ``allocate_rest``."""
        if self._thread is not None:
            self._thread.join()


def _allocate(pieces: Sequence[Array]) -> None:
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(make_resident, pieces))


def _allocate_slowly(pieces: Sequence[Array]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    failed = sum(not populate(piece, write=True) for piece in pieces)
    if failed:
        logger.warning("%d MiB of the KV cache get their memory when they are used", failed * _PIECE_BYTES >> 20)
