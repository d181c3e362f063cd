"""The exchange: what the agents of one group hand each other, in shared memory. THE layout, and its owner's side.

A group is the agents of one replica: ``tensor_parallel`` of them in each of ``pipeline_parallel`` stages. Beside the
step slots the server makes one such segment for every group of more than one agent, each of which maps it. Kernels
(``agent/kernels/exchange/``) and Python (``agent/group/exchange.py``) write in it:

    header              magic, what the layout was made for, the word that says the group is down
    flag lines          a cache line each: a counter that only one agent raises, and how many sleep until it moves
    tokens              of each state row, the token sampled last; the agent that samples writes them
    collective buffers  two for each agent, taken in turns: its contribution to a sum or a gather, a piece at a time
    activation rings    one for each border between stages: the residual stream of the last ``RING_STEPS`` steps

Who waits for whom, and why nothing is overwritten too early, is said where it is done.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llm_serving.errors import ProtocolError
from llm_serving.ipc.segment import NamedSegment, map_segment, new_segment
from llm_serving.ipc.shm import SlotLimits

if TYPE_CHECKING:
    from llm_serving.config import ParallelConfig
    from llm_serving.model.shape import ModelShape

EXCHANGE_MAGIC = 0x0E8C4A6E
EXCHANGE_VERSION = 1
COLLECTIVE_BYTES = 512 * 1024
"""A piece: large sums go through the buffers in pieces of this size, small enough to stay in a cache."""
COLLECTIVE_BUFFERS = 2
RING_STEPS = 2
"""Steps whose activations a stage may be ahead of the next."""
LINE_BYTES = 64
_PAGE_BYTES = 4096
_ELEMENT_BYTES = 4
"""Of the largest type of activations."""

MAGIC_WORD, VERSION_WORD, GROUP_SIZE_WORD, DOWN_WORD = range(4)
"""Indices in the header's uint32 words."""


@dataclass(frozen=True, slots=True)
class ExchangeLayout:
    """Byte offsets of everything in the segment. Both sides compute the same from the same config."""

    tensor_parallel: int
    pipeline_parallel: int
    hidden_size: int
    max_tokens: int
    """Rows of the largest step."""
    max_rows: int
    """State rows, each with a token."""

    @classmethod
    def of(cls, shape: ModelShape, limits: SlotLimits, parallel: ParallelConfig) -> ExchangeLayout:
        return cls(
            tensor_parallel=parallel.tensor_parallel,
            pipeline_parallel=parallel.pipeline_parallel,
            hidden_size=shape.hidden_size,
            max_tokens=limits.max_tokens,
            max_rows=limits.max_seqs,
        )

    @property
    def group_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def collective_line(self, member: int) -> int:
        """Pieces that a member of the group (its rank in it) has published."""
        return LINE_BYTES * (1 + member)

    def arrival_line(self, member: int) -> int:
        """Times that a member has come to the group's meeting point."""
        return LINE_BYTES * (1 + self.group_size + member)

    def ring_written_line(self, border: int) -> int:
        """Steps that the stage before ``border`` (0: between the first two stages) has handed over."""
        return LINE_BYTES * (1 + 2 * self.group_size + border)

    def ring_read_line(self, member: int) -> int:
        """Steps that a member of a later stage has taken from the ring before it."""
        return LINE_BYTES * (1 + 2 * self.group_size + self.pipeline_parallel + member)

    @property
    def token_line(self) -> int:
        """Steps whose sampled tokens are in ``tokens``."""
        return LINE_BYTES * (1 + 3 * self.group_size + self.pipeline_parallel)

    @property
    def tokens(self) -> int:
        """int32 [max_rows]"""
        return self.token_line + LINE_BYTES

    @property
    def collective_buffers(self) -> int:
        """[group_size, COLLECTIVE_BUFFERS, COLLECTIVE_BYTES], on a page's start; none without tensor parallelism."""
        return _to_pages(self.tokens + 4 * self.max_rows)

    @property
    def collective_member_bytes(self) -> int:
        """Of one agent's buffers."""
        return COLLECTIVE_BUFFERS * COLLECTIVE_BYTES if self.tensor_parallel > 1 else 0

    @property
    def ring_step_bytes(self) -> int:
        """Room for one step's activations [max_tokens, hidden_size]."""
        return _to_pages(self.max_tokens * self.hidden_size * _ELEMENT_BYTES)

    def ring(self, border: int) -> int:
        """[RING_STEPS, ring_step_bytes] of a border between stages."""
        after = self.collective_buffers + self.group_size * self.collective_member_bytes
        return after + border * RING_STEPS * self.ring_step_bytes

    @property
    def num_bytes(self) -> int:
        return self.ring(self.pipeline_parallel - 1)


def exchange_bytes(shape: ModelShape, limits: SlotLimits, parallel: ParallelConfig) -> int:
    """Bytes of a group's exchange; 0 for an agent alone, which has none."""
    layout = ExchangeLayout.of(shape, limits, parallel)
    return layout.num_bytes if layout.group_size > 1 else 0


class ExchangeMemory(NamedSegment):
    """A mapped exchange. The server creates and unlinks it, an agent attaches to it."""

    def __init__(self, name: str, layout: ExchangeLayout, mapping: mmap.mmap) -> None:
        super().__init__(name)
        self.layout = layout
        self.mapping = mapping
        self.header: npt.NDArray[np.uint32] = np.frombuffer(mapping, np.uint32, LINE_BYTES // 4)

    @classmethod
    def create(cls, layout: ExchangeLayout) -> ExchangeMemory:
        """Make a new segment of zeros, its pages reserved now. Raises OSError when /dev/shm is too small."""
        with new_segment(layout.num_bytes) as (name, mapping):
            memory = cls(name, layout, mapping)
        memory.has_name = True
        memory.header[: DOWN_WORD + 1] = EXCHANGE_MAGIC, EXCHANGE_VERSION, layout.group_size, 0
        return memory

    @classmethod
    def attach(cls, name: str, layout: ExchangeLayout) -> ExchangeMemory:
        """Map a segment the server made. Raises ProtocolError when name, size or header are not as agreed."""
        memory = cls(name, layout, map_segment(name, layout.num_bytes, "exchange"))
        found = tuple(memory.header[:DOWN_WORD].tolist())
        wanted = (EXCHANGE_MAGIC, EXCHANGE_VERSION, layout.group_size)
        if found != wanted:
            raise ProtocolError(f"the exchange segment begins with {found}; {wanted} was agreed")
        return memory

    def mark_down(self) -> None:
        """Tell whoever waits in the exchange that a member is gone: they end their processes within a moment."""
        self.header[DOWN_WORD] = 1

    @property
    def is_down(self) -> bool:
        return bool(self.header[DOWN_WORD])

    def close(self) -> None:
        """Unlink and drop the mapping. The pages go when the last view of them does."""
        self.unlink()
        self.header = np.zeros(LINE_BYTES // 4, np.uint32)


def _to_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
