"""Limits the free memory that the server process keeps, and returns the memory of ended engines to the system."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc

LARGE_BYTES = 1 << 20
"""Minimum bytes of an allocation that the C library maps separately, so that its memory is returned when it is freed.
"""
MAX_FREE_BYTES = 1 << 20
"""Maximum free bytes at the end of a heap of the C library. If more are free, they return to the operating system."""
TRIM_S = 5.0
"""Seconds from the arrival of a large request body until its memory is returned to the system. By then, the server has
tokenized or refused the body.
"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of the parameters of ``mallopt`` in glibc's malloc.h."""


def limit_free_memory() -> None:
    """Makes the C library keep little free memory in this process. Call this function at the start of a server.

    It sets the limits ``LARGE_BYTES`` and ``MAX_FREE_BYTES``. Without this call, glibc raises these two limits when
    large allocations are freed, up to 32 MiB and 64 MiB, see mallopt(3). The server would then keep the memory of the
    largest request bodies that it received.
    """
    with contextlib.suppress(OSError, AttributeError):  # only the C library of GNU has this function
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, MAX_FREE_BYTES)


def return_free_memory() -> None:
    """Frees unused engines, whose objects form reference cycles, and returns free memory to the operating system."""
    gc.collect()
    _trim()


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):  # only the C library of GNU has this function
        ctypes.CDLL(None).malloc_trim(0)


class LargeBodies:
    """Returns the memory of large request bodies to the operating system. Only the event loop's thread may use it.

    The limits of ``limit_free_memory`` do not suffice. If the address space of the process is short, the C library
    takes large blocks from the heap of a thread. A small block behind them then keeps the heap from becoming smaller.
    Each thread may have its own heap, so several heaps could each keep the memory of a large body.
    """

    def __init__(self) -> None:
        self._is_pending = False
        """Whether a timer runs, after which the free memory is returned."""
        self._is_again = False
        """Whether another large body has been read since the timer was started. If so, a second timer follows the
        first.
        """

    def note(self, num_bytes: int) -> None:
        """Records that a body of ``num_bytes`` has been read.

        Another thread returns the free memory ``TRIM_S`` seconds after a large body. If more large bodies arrive during
        this time, the memory is returned again ``TRIM_S`` seconds later.
        """
        if num_bytes < LARGE_BYTES:
            return
        if self._is_pending:
            self._is_again = True
        else:
            self._start()

    def _start(self) -> None:
        self._is_pending, self._is_again = True, False
        asyncio.get_running_loop().call_later(TRIM_S, self._return)

    def _return(self) -> None:
        self._is_pending = False
        if self._is_again:
            self._start()
        with contextlib.suppress(RuntimeError):  # the server stops, so its threads take no more work
            asyncio.get_running_loop().run_in_executor(None, _trim)
