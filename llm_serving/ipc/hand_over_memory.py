"""The hand-over pool in shared memory: blocks of computed prompts that move between replicas of one machine.

Agents with the same rank within their replicas map the same segment. The server creates it once, and restarted agents
map it again. The segment begins with a header of 64 bytes for each block. The blocks begin at the next page. The KV
cache is a list of arrays, each with the keys or the values of a layer. A block of the pool has the contents of one KV
block in all these arrays, one after the other. So the block can be sent to another machine in one piece.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.config import Config
from llm_serving.ipc.segment import LaidOutSegment
from llm_serving.model.parallel import answers, local_shape

Array = npt.NDArray[Any]

STORED_HEADER_BYTES = 64
"""Bytes of the header of a stored block: 32 bytes from ``handover.header``, a checksum of 16 bytes, and unused bytes.
"""


@dataclass(frozen=True, slots=True)
class HandOverLayout:
    """The sizes of the hand-over pool of one rank."""

    num_arrays: int
    num_blocks: int
    part_bytes: int
    """Size in bytes of the part of a block that one array of the KV cache holds."""

    @classmethod
    def of(cls, config: Config, rank: int) -> HandOverLayout | None:
        """Returns the layout for the agent ``rank`` of a replica. None if replicas have no roles.

        ``config`` describes the whole model, not only the agent's part. The arrays of a head (``Config.draft``) follow
        those of the model, in the agent that makes drafts. A draft model has no arrays here, because it computes
        prompts again after a hand-over.
        """
        if not config.num_hand_over_blocks:
            return None
        shapes = [local_shape(config.shape, config.shard(rank))]
        if config.draft is not None and config.draft.head is not None and answers(rank, config.parallel_config):
            shapes.append(config.draft.shape)
        num_arrays = sum(shape.num_cache_arrays for shape in shapes)
        block_bytes = sum(map(config.kv_bytes_of, shapes)) * config.pa_config.block_size
        return cls(num_arrays, config.num_hand_over_blocks, block_bytes // num_arrays)

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes: the sum of its parts in all arrays."""
        return self.num_arrays * self.part_bytes

    @property
    def first_block(self) -> int:
        """Byte offset of the first block in the segment."""
        return -(-self.num_blocks * STORED_HEADER_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self.first_block + self.num_blocks * self.block_bytes


class HandOverMemory(LaidOutSegment[HandOverLayout]):
    """The mapped hand-over pool of one rank. The server creates and unlinks it; the agents attach to it."""

    KIND = "hand-over pool"

    def _make_views(self, mapping: mmap.mmap) -> None:
        layout = self.layout
        size = layout.num_blocks, STORED_HEADER_BYTES
        self.headers: Array = np.ndarray(size, np.uint8, mapping)
        """The headers of all blocks: bytes [blocks, STORED_HEADER_BYTES]."""
        self.blocks: Array = np.ndarray(
            (layout.num_blocks, layout.block_bytes), np.uint8, mapping, offset=layout.first_block
        )
        """The contents of all blocks: bytes [blocks, block_bytes]."""
