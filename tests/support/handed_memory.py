"""The hand-over pool of fake devices. It has token ids, headers and checksums, and a test can damage them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.handover.header import HEADER_BYTES
from llm_serving.ipc.hand_over_memory import STORED_HEADER_BYTES

__all__ = ["HandedMemory"]

CHECKSUM_END = HEADER_BYTES + 16
KEPT_WRITES = 8


class HandedMemory:
    """The memory of a hand-over pool, for fake devices and for transports. It checks blocks as the agents do."""

    def __init__(
        self, num_blocks: int, block_size: int, seed: int = 0, salts: dict[int, bytes] | None = None
    ) -> None:
        """Makes a pool. ``salts`` has the salt of the last write to each block; the pools of several replicas share it.
        """
        self.num_blocks = num_blocks
        self.salts = {} if salts is None else salts
        self._rng = random.Random(seed)
        self.headers: npt.NDArray[Any] = np.zeros((num_blocks, STORED_HEADER_BYTES), np.uint8)
        self.blocks: npt.NDArray[Any] = np.zeros((num_blocks, block_size * 4), np.uint8)
        self._written: list[list[tuple[bytes, bytes]]] = [[] for _ in range(num_blocks)]
        """For each block: the stored headers and contents of the last writes."""
        self.num_bad = 0
        """Number of reads that found a damaged block, or another block than the expected one."""

    def write(self, block: int, tokens: Sequence[int], header: bytes) -> None:
        assert len(header) == HEADER_BYTES
        content = np.array(tokens, "<i4").tobytes()
        self._store(block, header + _checksum(content), content)
        self._written[block] = [*self._written[block][1 - KEPT_WRITES :], (header + _checksum(content), content)]

    def read(self, block: int, header: bytes) -> tuple[list[int], bool]:
        """Returns the content of a block, and whether it is the expected one."""
        content = self.blocks[block].tobytes()
        is_good = self.headers[block, :CHECKSUM_END].tobytes() == header + _checksum(content)
        self.num_bad += not is_good
        return np.frombuffer(content, "<i4").tolist(), is_good

    def flip(self, block: int) -> None:
        """Changes one bit of a block, as a damaged memory would."""
        self.blocks[block, self._rng.randrange(self.blocks.shape[1])] ^= 1 << self._rng.randrange(8)

    def overwrite(self, block: int) -> None:
        """Writes a whole block of an earlier hand-over, as an agent would that is thought to be dead."""
        earlier = self._written[block][:-1]
        if earlier:
            self._store(block, *self._rng.choice(earlier))
            return
        content = self._rng.randbytes(self.blocks.shape[1])
        self._store(block, bytes(HEADER_BYTES) + _checksum(content), content)

    def _store(self, block: int, stored_header: bytes, content: bytes) -> None:
        self.headers[block, :CHECKSUM_END] = np.frombuffer(stored_header, np.uint8)
        self.blocks[block] = np.frombuffer(content, np.uint8)


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=CHECKSUM_END - HEADER_BYTES).digest()
