"""The hand-over pool of fake devices: token ids, headers and checksums, which a test can damage."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llm_serving.handover.header import HEADER_BYTES, pack_header

__all__ = ["HandedMemory"]


class HandedMemory:
    """The memory of the hand-over pool, which all fake devices share. It checks blocks as the agents do."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.salts: dict[int, bytes] = {}
        """The salt of the last write to each block."""
        self._rng = random.Random(seed)
        self.blocks = [[0] * block_size for _ in range(num_blocks)]
        self.headers = [b""] * num_blocks
        self._sums = [0] * num_blocks
        self.num_bad = 0
        """Number of reads that found a damaged or another block."""

    def write(self, block: int, tokens: Sequence[int], header: bytes) -> None:
        assert len(header) == HEADER_BYTES
        self.blocks[block] = list(tokens)
        self.headers[block], self._sums[block] = header, hash(tuple(tokens))

    def read(self, block: int, header: bytes) -> tuple[list[int], bool]:
        """Returns the content of a block, and whether it is the expected one."""
        tokens = list(self.blocks[block])
        is_good = self.headers[block] == header and self._sums[block] == hash(tuple(tokens))
        self.num_bad += not is_good
        return tokens, is_good

    def flip(self, block: int) -> None:
        """Changes one token of a block, as a damaged memory would."""
        place = self._rng.randrange(len(self.blocks[block]))
        self.blocks[block][place] ^= 1 << self._rng.randrange(16)

    def overwrite(self, block: int) -> None:
        """Writes a whole block of an earlier hand-over, as an agent would that is thought to be dead."""
        tokens = [self._rng.randrange(50) for _ in self.blocks[block]]
        self.write(block, tokens, pack_header(bytes(8), bytes(16), self._rng.randrange(3)))
