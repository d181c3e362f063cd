"""Makes caches of random bytes and moves of their blocks, and computes the expected result of the moves in NumPy."""

from __future__ import annotations

import numpy as np

from llm_serving.ipc.shm import MoveKind

COPY, OUT, IN = MoveKind.COPY, MoveKind.SWAP_OUT, MoveKind.SWAP_IN
DEVICE_BLOCKS, HOST_BLOCKS = 9, 4
Arrays = list[np.ndarray]


def make_caches(num_arrays: int, dtype: str, tail: tuple[int, ...], seed: int = 0) -> tuple[Arrays, Arrays]:
    """Returns a cache of 9 blocks and a host pool of 4 blocks, with random bytes.

    Each is a list of ``num_arrays`` arrays [blocks, *tail].
    """
    rng = np.random.default_rng(seed)
    size = int(np.prod(tail)) * np.dtype(dtype).itemsize

    def pool(blocks: int) -> Arrays:
        return [
            np.frombuffer(bytearray(rng.bytes(blocks * size)), dtype).reshape(blocks, *tail) for _ in range(num_arrays)
        ]

    return pool(DEVICE_BLOCKS), pool(HOST_BLOCKS)


def random_moves(count: int, seed: int = 1) -> np.ndarray:
    """Returns moves [count, 3] of every kind between random blocks."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, count)
    sources = rng.integers(0, np.where(kinds == IN, HOST_BLOCKS, DEVICE_BLOCKS))
    destinations = rng.integers(0, np.where(kinds == OUT, HOST_BLOCKS, DEVICE_BLOCKS))
    return np.stack([kinds, sources, destinations], 1).astype(np.int32)


def after_moves(device: Arrays, host: Arrays, moves: np.ndarray) -> tuple[Arrays, Arrays]:
    """Returns copies of cache and host pool in which the moves were made, one after the other."""
    device, host = [array.copy() for array in device], [array.copy() for array in host]
    for on_device, on_host in zip(device, host, strict=True):
        for kind, source, destination in moves.tolist():
            from_array = on_host if kind == IN else on_device
            to_array = on_host if kind == OUT else on_device
            to_array[destination] = from_array[source]
    return device, host


def bits(arrays: Arrays) -> list[bytes]:
    return [array.tobytes() for array in arrays]
