"""Gives the memory of engines that have ended back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def return_free_memory() -> None:
    """Collect engines that nothing uses, because they have reference cycles, and return free memory to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only the C library of GNU has this function
        ctypes.CDLL(None).malloc_trim(0)
