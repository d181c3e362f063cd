"""Returns the memory of engines that have ended to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def return_free_memory() -> None:
    """Frees unused engines, whose objects form reference cycles, and returns free memory to the operating system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only the C library of GNU has this function
        ctypes.CDLL(None).malloc_trim(0)
