"""Reads and damages the hand-over pools of a running node."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from llm_serving.ipc.hand_over_memory import STORED_HEADER_BYTES, Array, HandOverLayout

__all__ = ["PoolMemory", "pool_memories"]


class PoolMemory:
    """A hand-over pool that a node has mapped. It is read through the node's process, because the segment has no name
    any more.
    """

    def __init__(self, pid: int, address: int, layout: HandOverLayout) -> None:
        self._file, self._address, self._layout = Path(f"/proc/{pid}/mem"), address, layout

    def read(self) -> bytearray:
        with self._file.open("rb", buffering=0) as memory:
            memory.seek(self._address)
            return bytearray(memory.read(self._layout.num_bytes))

    def write(self, content: bytes | bytearray) -> None:
        with self._file.open("r+b", buffering=0) as memory:
            memory.seek(self._address)
            assert memory.write(content) == len(content)

    def headers(self, content: bytearray) -> Array:
        """Returns the headers in ``content``, which ``read`` has returned: [blocks, STORED_HEADER_BYTES], uint8."""
        size = self._layout.num_blocks * STORED_HEADER_BYTES
        return np.frombuffer(content, np.uint8, size).reshape(-1, STORED_HEADER_BYTES)

    def blocks(self, content: bytearray) -> Array:
        """Returns the contents of the blocks in ``content``: [blocks, block_bytes], uint8."""
        return np.frombuffer(content, np.uint8, offset=self._layout.first_block).reshape(-1, self._layout.block_bytes)


def pool_memories(pid: int, layout: HandOverLayout) -> list[PoolMemory]:
    """Returns the pools of the node with the process id ``pid``. Their order is not that of the ranks."""
    wanted = -(-layout.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    places = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if "llm-serving-" in line]
    return [PoolMemory(pid, begin, layout) for begin, end in places if end - begin == wanted]
