"""Names the KV caches whose blocks have the layout of the CPU's attention kernel (ops/laid_out_caches.h)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import load_library


class LaidOutCaches:
    """Keeps the addresses of caches in the kernels until ``close``.

    The arrays must hold zeros when they are added, and must live until ``close``.
    """

    def __init__(self) -> None:
        self._library = load_library()
        self._arrays: list[npt.NDArray[Any]] = []

    def __len__(self) -> int:
        """Returns the number of caches."""
        return len(self._arrays)

    def add(self, array: npt.NDArray[Any]) -> None:
        """Makes the primitives read and write this cache, bfloat16 [blocks, block_size, kv_heads, head_dim], in the
        kernel's layout.

        NumPy has no bfloat16, so the array has the type uint16. Raises ValueError if it has another type, or if
        ``block_size`` or ``head_dim`` is no multiple of 16.
        """
        if array.dtype != np.uint16 or not lays_out(array.shape[1], array.shape[3]) or not array.flags.c_contiguous:
            raise ValueError(
                "a laid out cache is contiguous uint16 with blocks and heads of multiples of 16, not "
                f"{array.dtype} {array.shape}"
            )
        self._library.llmk_keep_laid_out(array.ctypes.data)
        self._arrays.append(array)

    def close(self) -> None:
        """Forgets all caches. May be called twice."""
        for array in self._arrays:
            self._library.llmk_forget_laid_out(array.ctypes.data)
        self._arrays.clear()


def lays_out(block_size: int, head_dim: int) -> bool:
    """Returns whether a bfloat16 cache of these sizes can have the kernel's layout."""
    return block_size % 16 == 0 and head_dim % 16 == 0
