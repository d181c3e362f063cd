"""Limits the free memory that the server process keeps, and returns the memory of ended engines to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc

LARGE_BYTES = 1 << 20
"""Minimum bytes of an allocation that the C library maps separately, so that its memory is returned when it is freed.
"""
MAX_FREE_BYTES = 1 << 20
"""Maximum free bytes at the end of a heap of the C library. If more are free, they return to the operating system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of the parameters of ``mallopt`` in glibc's malloc.h."""


def limit_free_memory() -> None:
    """Makes the C library keep little free memory in this process. Call this function at the start of a server.

    By default, glibc raises both limits when large allocations are freed, see mallopt(3). They grow up to 32 MiB for
    an allocation and 64 MiB at the end of each heap. The server would then keep the memory of the largest request
    bodies that it received.
    """
    with contextlib.suppress(OSError, AttributeError):  # only the C library of GNU has this function
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, MAX_FREE_BYTES)


def return_free_memory() -> None:
    """Frees unused engines, whose objects form reference cycles, and returns free memory to the operating system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only the C library of GNU has this function
        ctypes.CDLL(None).malloc_trim(0)
