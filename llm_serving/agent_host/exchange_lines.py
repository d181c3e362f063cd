"""Reads and increments the flag lines of an exchange from Python, in a process without kernels.

``agent/kernels/exchange/lines.h`` has the layout of a flag line, and the same operations for agents.
"""

from __future__ import annotations

import ctypes
import platform
import threading

import numpy as np
import numpy.typing as npt

from llm_serving.ipc.exchange import ExchangeMemory

_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of the system call ``futex`` on each architecture."""
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_SIZE_WORD = 2
"""Index of the first size in a flag line, in 32-bit words.

A flag line has the sizes of the data that its counter announced with the last two values. The size for the even value
comes first, then the size for the odd value.
"""
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    """The C struct ``timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FlagLines:
    """The flag lines of one exchange. Any thread may use the object. ``line`` is the offset of a flag line."""

    def __init__(self, memory: ExchangeMemory) -> None:
        self._words: npt.NDArray[np.uint32] = np.frombuffer(memory.mapping, np.uint32)
        self._base = int(self._words.ctypes.data)
        self._number = _FUTEX[platform.machine()]

    def value(self, line: int) -> int:
        """Returns the counter. The caller may then read the data that the counter announces."""
        value = int(self._words[line // 4])
        _order_memory()
        return value

    def num_bytes(self, line: int, value: int) -> int:
        """Returns the size of the data that the counter announced with ``value``.

        ``value`` must be one of the last two values of the counter, because a flag line has only their sizes.
        """
        return int(self._words[line // 4 + _SIZE_WORD + value % 2])

    def publish(self, line: int, value: int) -> None:
        """Sets the counter and wakes the agents that wait for it. They then see all earlier writes of this thread."""
        _order_memory()
        self._words[line // 4] = value
        self._call(line, _WAKE, _ALL, None)

    def wait(self, line: int, seen: int, timeout_s: float) -> None:
        """Sleeps while the counter is ``seen``, at most for ``timeout_s``."""
        whole = int(timeout_s)
        self._call(line, _WAIT, seen, ctypes.byref(_Time(whole, int((timeout_s - whole) * 1e9))))

    def _call(self, line: int, operation: int, number: int, timeout: object) -> None:
        address = ctypes.c_void_p(self._base + line)
        _LIBC.syscall(ctypes.c_long(self._number), address, operation, ctypes.c_uint32(number), timeout, None, 0)


def _order_memory() -> None:
    """Makes this thread complete its earlier memory accesses before its later ones.

    Processors other than x86 may otherwise change the order of accesses. Taking and releasing a lock prevents this.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
