"""Copies blocks between the KV cache and the hand-over pool. The pool has a header and a checksum for each block."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, load_library, structure

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
CHECKSUM_WORDS = 2
"""Number of 64-bit words of a checksum (``kChecksumWords`` of agent/kernels/ops/hand_blocks.h)."""
_MOVE_WIDTH, _HEADER_BYTES, _STORED_BYTES = 3, 32, 64
_HandBlocksArgs = structure(
    "HandBlocksArgs",
    "pointer: device pool headers moves expected faults; "
    "int64: num_arrays num_moves part_bytes device_blocks pool_blocks",
)
"""A ctypes class with the members of llmk::HandBlocksArgs in ops/hand_blocks.h."""


class BlockHandOvers:
    """Copies blocks of the KV cache to and from a hand-over pool. The arrays must not move, because their addresses are
    read only once.

    ``device[i]`` holds the keys or the values of one layer, with the block as first axis. The pool consists of two
    uint8 arrays. ``blocks`` is [pool blocks, bytes of a block in all arrays]. ``headers`` is [pool blocks, 64]. For
    each block, it has a header of 32 bytes, which identifies the content of the block, and a checksum.
    """

    def __init__(self, device: Sequence[Array], blocks: Array, headers: Array) -> None:
        """Stores the addresses of the arrays. Raises ValueError unless all arrays are contiguous and the blocks of
        cache and pool have equal sizes.
        """
        sizes = {(array.shape[0], array[0].nbytes) for array in device}
        if len(sizes) != 1 or not all(array.flags.c_contiguous for array in (*device, blocks, headers)):
            raise ValueError(f"cache arrays must be contiguous and have equal blocks; they have {sorted(sizes)}")
        ((num_blocks, part_bytes),) = sizes
        wanted = (blocks.shape[0], len(device) * part_bytes)
        if blocks.shape != wanted or headers.shape != (wanted[0], _STORED_BYTES):
            raise ValueError(
                f"the hand-over pool is {blocks.shape} with headers {headers.shape}; the cache needs {wanted} and"
                f" {(wanted[0], _STORED_BYTES)}"
            )
        self._function = load_library().llmk_hand_blocks
        addresses = (ctypes.c_void_p * len(device))(*[array.ctypes.data for array in device])
        self._keep_alive = (*device, blocks, headers, addresses)
        self._args = _HandBlocksArgs(
            device=ctypes.addressof(addresses),
            pool=blocks.ctypes.data,
            headers=headers.ctypes.data,
            num_arrays=len(device),
            part_bytes=part_bytes,
            device_blocks=num_blocks,
            pool_blocks=blocks.shape[0],
        )

    def run(self, moves: Int32Array, expected: Array, faults: Int32Array) -> None:
        """Runs the copies in ``moves``, contiguous int32 [copies, 3]: kind, source block, destination block.

        ``expected`` has a header of 32 bytes for each move. A move to the pool stores this header with the block. A
        move from the pool compares this header with the stored header. If the headers differ or the checksum of the
        block is wrong, sets ``faults[i]`` of move ``i`` to 1. If a kind or a block does not exist, copies nothing and
        raises KernelError.
        """
        count = moves.shape[0]
        if moves.dtype != np.int32 or moves.shape != (count, _MOVE_WIDTH) or not moves.flags.c_contiguous:
            raise ValueError(f"moves are {moves.dtype} {moves.shape}; they must be contiguous int32 [moves, 3]")
        if expected.nbytes < count * _HEADER_BYTES or faults.dtype != np.int32 or faults.size < count:
            raise ValueError(
                f"{count} moves need {count * _HEADER_BYTES} bytes of headers and {count} int32 faults; there are "
                f"{expected.nbytes} bytes and {faults.size} {faults.dtype}"
            )
        self._args.moves, self._args.num_moves = moves.ctypes.data, count
        self._args.expected, self._args.faults = expected.ctypes.data, faults.ctypes.data
        code = self._function(ctypes.byref(self._args))
        if code != 0:
            raise KernelError(f"hand-overs were refused (code {code}); the reason is on standard error")


def block_checksum(block: Array, num_parts: int) -> bytes:
    """Returns the checksum (16 bytes) of a contiguous block of the pool, which has ``num_parts`` parts of equal size.
    """
    checksum = np.zeros(CHECKSUM_WORDS, np.uint64)
    load_library().llmk_block_checksum(block.ctypes.data, num_parts, block.nbytes // num_parts, checksum.ctypes.data)
    return checksum.tobytes()
