"""Adds the arrays of several agents within one process, and measures all-reduces between processes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, load_library
from agent.weights.storage import STORAGE_DTYPES
from performance.kernels.calls import DTYPES
from performance.kernels.library import load_testing_library

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


def sum_parts(parts: list[npt.NDArray[Any]], dtype: str, out_dtype: str = "") -> npt.NDArray[Any]:
    """Adds the arrays ``parts``, one for each agent, in the order in which an all-reduce adds them. Returns the sum.

    ``dtype`` is the type of the parts. The result has the type ``out_dtype`` (default: ``dtype``). The two types may
    differ only if the parts are float32.
    """
    addresses = (_POINTER * len(parts))(*[part.ctypes.data for part in parts])
    out = np.empty(parts[0].shape, STORAGE_DTYPES[out_dtype or dtype])
    function = load_testing_library().llmk_test_sum_parts
    function.argtypes = [ctypes.c_int, _POINTER, ctypes.c_int, ctypes.c_int, _POINTER, _INT64]
    function.restype = None
    numbers = (DTYPES.index(dtype), DTYPES.index(out_dtype or dtype))
    function(numbers[0], addresses, len(parts), numbers[1], out.ctypes.data, out.size)
    return out


def measure_all_reduce(array: npt.NDArray[Any], dtype: str, times: int) -> npt.NDArray[np.int64]:
    """Runs ``times`` all-reduces over the exchange that this process has opened. Returns the nanoseconds of each."""
    out, nanoseconds = np.empty_like(array), np.empty(times, np.int64)
    function = load_testing_library().llmk_measure_all_reduce
    function.argtypes = [_POINTER, ctypes.c_int, _POINTER, _POINTER, _INT64, _INT64, _POINTER]
    entry = ctypes.cast(load_library().llmk_all_reduce, _POINTER)
    number, data = DTYPES.index(dtype), (array.ctypes.data, out.ctypes.data)
    if (code := function(entry, number, *data, array.size, times, nanoseconds.ctypes.data)) != 0:
        raise KernelError(f"the exchange failed (code {code}); the reason is on standard error")
    return nanoseconds


def measure_ping_pong(own: int, other: int, times: int, *, serves: bool) -> npt.NDArray[np.int64]:
    """Passes a counter ``times`` times to another process and back. Returns the nanoseconds of each round trip.

    ``own`` and ``other`` are addresses of counters in shared memory (``FlagLine``): this process writes ``own``, and
    the other process writes ``other``. Both must be 0 before the call. The process whose argument ``serves`` is True
    writes first.
    """
    nanoseconds = np.empty(times, np.int64)
    function = load_testing_library().llmk_measure_ping_pong
    function.argtypes = [_POINTER, _POINTER, ctypes.c_int, _INT64, _POINTER]
    function.restype = None
    function(own, other, int(serves), times, nanoseconds.ctypes.data)
    return nanoseconds
