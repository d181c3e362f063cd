"""Stores weights in NumPy arrays. NumPy has no bfloat16, so an array of uint16 stores the bits of bfloat16 values.

Conversions round to nearest, ties to even. If a value is too large for the target type, a conversion raises an error
instead of storing infinity.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

STORAGE_DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
}
"""NumPy's type for the elements of an array, by the name of the weights' type. bfloat16 is stored as uint16."""

_CHUNK_ELEMENTS = 1 << 15
"""Number of elements that are copied or converted at a time."""
_ALIGNMENT = 64
"""Small arrays begin at multiples of this number of bytes."""
_HUGE_PAGE = 2 << 20
"""Size of a huge page of memory, in bytes."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""The numbers of MADV_POPULATE_READ and MADV_POPULATE_WRITE. Linux has them since 5.14, and Python does not name them.
"""


def allocate(shape: tuple[int, ...], dtype: str) -> Array:
    """Returns an uninitialised array, aligned to a cache line. NumPy requests huge pages for a large array."""
    storage = np.dtype(STORAGE_DTYPES[dtype])
    num_bytes = int(np.prod(shape)) * storage.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(storage).reshape(shape)


def zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Returns an array of zeros whose pages are already allocated.

    So a lack of memory makes the start of the agent fail, and not a later step. A large array has its own mapping with
    huge pages. The function releases the GIL while the system allocates pages.
    """
    array = future_zeros(shape, dtype)
    make_resident(array)
    return array


def future_zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Returns an array of zeros. The system allocates each page at its first use, or in ``make_resident``."""
    storage = np.dtype(STORAGE_DTYPES[dtype])
    num_bytes = int(np.prod(shape)) * storage.itemsize
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError):  # Linux without huge pages refuses this advice
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + num_bytes].view(storage).reshape(shape)


def make_resident(array: Array) -> None:
    """Allocates all pages of an array that ``future_zeros`` returned, without changing their contents.

    Releases the GIL while the system allocates pages. No other thread may write to the array at the same time.
    """
    # Linux before 5.14 cannot populate pages. Writing to each page then allocates it.
    if array.size and not populate(array, write=True):
        pages = array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
        np.bitwise_or(pages, np.uint8(0), out=pages)


def populate(pages: Array, *, write: bool) -> bool:
    """Makes the system allocate or read the memory pages of an array now. Returns False if the system cannot do that.

    The array must begin at a page. ``write`` allocates pages for writing; otherwise, pages of a mapped file are read.
    Releases the GIL while the system works.
    """
    advice = _POPULATE_WRITE if write else _POPULATE_READ
    return int(_libc().madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes), advice)) == 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def huge_page_bytes() -> int:
    """Returns the bytes of this process's memory in huge pages, or 0 if the system does not report them.

    The figure is for the status page: with pages of 4 KiB instead of huge pages, attention reads memory 10 % slower.
    """
    return _memory_bytes("AnonHugePages:", "FilePmdMapped:")


def file_huge_page_bytes() -> int:
    """Returns the bytes of mapped files in huge pages, or 0 if the system does not report them."""
    return _memory_bytes("FilePmdMapped:")


def _memory_bytes(*kinds: str) -> int:
    """Returns the sum of these entries of the process's memory. Linux visits all of its pages for them."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))


def convert_into(source: Array, source_dtype: str, out: Array, out_dtype: str) -> None:
    """Copies ``source`` to ``out`` and converts the type, in pieces that fit a cache.

    Both arrays are contiguous and have the same number of elements. Raises OverflowError if a finite value does not
    fit ``out_dtype``.
    """
    source, out = source.reshape(-1), out.reshape(-1)
    for start in range(0, source.size, _CHUNK_ELEMENTS):
        piece = slice(start, start + _CHUNK_ELEMENTS)
        if source_dtype == out_dtype:
            out[piece] = source[piece]
        else:
            out[piece] = from_float32(to_float32(source[piece], source_dtype), out_dtype)


def to_float32(array: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Converts float16, bfloat16 or float32 to float32, without rounding."""
    if dtype == "bfloat16":
        bits = array.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return array.astype(np.float32, copy=False)


def from_float32(array: npt.NDArray[np.float32], dtype: str) -> Array:
    """Rounds float32 values to ``dtype``. Raises OverflowError if a finite value does not fit."""
    if dtype == "float32":
        return array
    with np.errstate(over="ignore"):
        rounded = _round_to_bfloat16(array) if dtype == "bfloat16" else array.astype(np.float16)
    # ``largest`` has the bits of infinity. Without the sign bit, the bits of every finite value are a smaller number.
    largest = 0x7F80 if dtype == "bfloat16" else 0x7C00
    if int((rounded.view(np.uint16) & np.uint16(0x7FFF)).max(initial=0)) >= largest:
        overflow = np.isinf(to_float32(rounded, dtype)) & np.isfinite(array)
        if overflow.any():
            raise OverflowError(f"{float(array[overflow][0]):g} does not fit {dtype}")
    return rounded


def _round_to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    if np.isnan(array).any():
        rounded[np.isnan(array)] = 0x7FC0
    return rounded.astype(np.uint16)
