"""Copies blocks within the KV cache and between KV cache and host pool, in one call for all layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, load_library, structure

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
_MOVE_WIDTH = 3
"""Number of columns of the array of block moves, which has one row for each move."""
_CopyBlocksArgs = structure(
    "CopyBlocksArgs", "pointer: device host moves; int64: num_arrays num_moves block_bytes device_blocks host_blocks"
)
"""A ctypes class with the members of llmk::CopyBlocksArgs in ops/copy_blocks.h."""


class BlockCopies:
    """Copies blocks of the KV cache. The arrays must not move, because their addresses are read only once.

    ``device[i]`` and ``host[i]`` hold the keys or the values of one layer, with the block as first axis. All blocks
    have the same size.
    """

    def __init__(self, device: Sequence[Array], host: Sequence[Array]) -> None:
        """Stores the addresses of the arrays. Raises ValueError unless all arrays are contiguous, their blocks have one
        shape and type, and each device array has a host array.
        """
        arrays = [*device, *host]
        shapes = {(array.dtype, array.shape[1:]) for array in arrays}
        if len(shapes) != 1 or not all(array.flags.c_contiguous for array in arrays):
            raise ValueError(f"cache arrays must be contiguous and have equal blocks; they have {sorted(shapes)}")
        if len(host) != len(device) or len({array.shape[0] for array in device}) != 1:
            raise ValueError(
                f"{len(device)} cache arrays of equal length need {len(device)} host arrays, not {len(host)}"
            )
        self._function = load_library().llmk_copy_blocks
        addresses = [(ctypes.c_void_p * len(pool))(*[a.ctypes.data for a in pool]) for pool in (device, host)]
        self._keep_alive = (arrays, addresses)
        self._args = _CopyBlocksArgs(
            device=ctypes.addressof(addresses[0]),
            host=ctypes.addressof(addresses[1]),
            num_arrays=len(device),
            block_bytes=device[0][0].nbytes,
            device_blocks=device[0].shape[0],
            host_blocks=host[0].shape[0],
        )

    def run(self, moves: Int32Array) -> None:
        """Runs the copies in ``moves``, in their order.

        ``moves`` is a contiguous int32 array [copies, 3]. A row is a ``MoveKind``, the source block and the destination
        block. If a kind or a block does not exist, copies nothing and raises KernelError.
        """
        if moves.dtype != np.int32 or moves.ndim != 2 or moves.shape[1] != _MOVE_WIDTH or not moves.flags.c_contiguous:
            raise ValueError(f"moves are {moves.dtype} {moves.shape}; they must be contiguous int32 [moves, 3]")
        self._args.moves, self._args.num_moves = moves.ctypes.data, moves.shape[0]
        code = self._function(ctypes.byref(self._args))
        if code != 0:
            raise KernelError(f"block copies were refused (code {code}); the reason is on standard error")
