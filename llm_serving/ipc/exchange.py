"""The exchange: shared memory in which the agents of one group pass data to each other.

This module has the layout, and the code that the server uses.

A group is the agents of one replica: ``tensor_parallel`` agents in each of ``pipeline_parallel`` stages. For every
group with more than one agent, the server creates one segment, and each agent maps it. Kernels
(``agent/kernels/exchange/``) and Python (``agent/group/exchange.py``) write to it:

    header              magic, version, group size, and the word that is set if the group has failed
    flag lines          one cache line each: a counter that one agent increments, the number of sleeping waiters, and
                        the sizes of the last two pieces of data that the counter announced
    bell                a flag line that all agents of a machine increment after each change, if the group spans
                        several machines. It wakes the process that copies data between these machines
    tokens              two places, used alternately: the last sampled token of each batch row, and the token that
                        the device has drawn for it in this step. The agent that samples writes them
    collective buffers  two for each agent, used alternately: one piece of its contribution to a sum or a gather
    activation rings    one for each border between stages: the residual stream of the last ``RING_STEPS`` steps

In the code of the agents, a comment at each wait for a counter explains why no data is overwritten too early.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llm_serving.errors import ProtocolError
from llm_serving.ipc.alignment import aligned
from llm_serving.ipc.segment import NamedSegment, map_segment, new_segment
from llm_serving.ipc.shm import SlotLimits

if TYPE_CHECKING:
    from llm_serving.config import ParallelConfig
    from llm_serving.model.shape import ModelShape

EXCHANGE_MAGIC = 0x0E8C4A6E
EXCHANGE_VERSION = 3
"""Version of the layout of the exchange."""
COLLECTIVE_BYTES = 512 * 1024
"""Bytes of one collective buffer. Larger sums and gathers are computed in pieces of this size, which fit the CPU's
cache.
"""
COLLECTIVE_BUFFERS = 2
"""Number of collective buffers of each agent. Successive pieces of an array go to different buffers."""
TOKEN_PLACES = 2
"""Number of steps whose tokens the exchange keeps. While an agent reads the tokens of a step, the next step may be
sampled.
"""
SAMPLED, DRAWN = range(2)
"""Indices of the two arrays of tokens that the exchange keeps for each step, see ``ExchangeLayout.tokens``."""
RING_STEPS = 2
"""Maximum number of steps by which a pipeline stage may be ahead of the next stage."""
LINE_BYTES = 64
"""Size of a cache line. Each counter has its own line."""
_PAGE_BYTES = 4096
"""Size of a page of memory. The collective buffers and the activation rings begin at multiples of this size."""
_ELEMENT_BYTES = 4
"""Bytes of an element of the activations in their largest type."""

MAGIC_WORD, VERSION_WORD, GROUP_SIZE_WORD, DOWN_WORD = range(4)
"""Indices of the header's uint32 words."""


@dataclass(frozen=True, slots=True)
class ExchangeLayout:
    """Byte offsets of all parts of the segment. Server and agents compute them from the same config."""

    tensor_parallel: int
    pipeline_parallel: int
    hidden_size: int
    max_tokens: int
    """Number of tokens of the largest step."""
    max_rows: int
    """Number of batch rows. The exchange has the last sampled token of each batch row."""

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
        """Returns the offset of the flag line of an agent's collective buffers. Its counter is the number of pieces of
        data that the agent has written to these buffers.

        ``member`` is the agent's rank in the group.
        """
        return LINE_BYTES * (1 + member)

    def arrival_line(self, member: int) -> int:
        """Returns the offset of the flag line for the group's barrier. Its counter shows how often the agent has
        arrived at the barrier.

        ``member`` is the agent's rank in the group.
        """
        return LINE_BYTES * (1 + self.group_size + member)

    def ring_written_line(self, border: int) -> int:
        """Returns the offset of a counter: the number of steps that the stage before ``border`` has put into the ring.

        Border 0 is between the pipeline stages 0 and 1, border 1 between the stages 1 and 2.
        """
        return LINE_BYTES * (1 + 2 * self.group_size + border)

    def ring_read_line(self, member: int) -> int:
        """Returns the offset of a counter: the number of steps whose activations an agent has read from its ring.

        ``member`` is the agent's rank in the group. Agents of the first pipeline stage read no ring.
        """
        return LINE_BYTES * (1 + 2 * self.group_size + self.pipeline_parallel + member)

    @property
    def token_line(self) -> int:
        """Offset of a counter: the number of steps whose sampled tokens have been written to the exchange."""
        return LINE_BYTES * (1 + 3 * self.group_size + self.pipeline_parallel)

    @property
    def bell_line(self) -> int:
        """Offset of the bell, a counter. Each agent of this machine increments it after it has changed another counter.

        So a process can wait for a change of any counter.
        """
        return self.token_line + LINE_BYTES

    @property
    def tokens(self) -> int:
        """Offset of the tokens of the last steps, int32 [TOKEN_PLACES, 2, max_rows].

        The middle axis has the indices ``SAMPLED`` and ``DRAWN``.
        """
        return self.bell_line + LINE_BYTES

    @property
    def token_place_bytes(self) -> int:
        """Bytes of the tokens of one step."""
        return 2 * 4 * self.max_rows

    @property
    def collective_buffers(self) -> int:
        """Offset of the collective buffers, bytes [agents, COLLECTIVE_BUFFERS, COLLECTIVE_BYTES].

        Without tensor parallelism, their size is 0.
        """
        return aligned(self.tokens + TOKEN_PLACES * self.token_place_bytes, _PAGE_BYTES)

    @property
    def collective_member_bytes(self) -> int:
        """Bytes of one agent's collective buffers, for sums and gathers."""
        return COLLECTIVE_BUFFERS * COLLECTIVE_BYTES if self.tensor_parallel > 1 else 0

    @property
    def ring_step_bytes(self) -> int:
        """Bytes of one step's activations [max_tokens, hidden_size]."""
        return aligned(self.max_tokens * self.hidden_size * _ELEMENT_BYTES, _PAGE_BYTES)

    def ring(self, border: int) -> int:
        """Returns the offset of the activation ring between the pipeline stages ``border`` and ``border + 1``.

        The ring consists of bytes [RING_STEPS, ring_step_bytes].
        """
        after = self.collective_buffers + self.group_size * self.collective_member_bytes
        return after + border * RING_STEPS * self.ring_step_bytes

    @property
    def num_bytes(self) -> int:
        return self.ring(self.pipeline_parallel - 1)


def exchange_bytes(shape: ModelShape, limits: SlotLimits, parallel: ParallelConfig) -> int:
    """Returns the size of a group's exchange in bytes. It is 0 for a group of one agent, which needs no exchange."""
    layout = ExchangeLayout.of(shape, limits, parallel)
    return layout.num_bytes if layout.group_size > 1 else 0


class ExchangeMemory(NamedSegment):
    """A mapped exchange. The server creates and unlinks it; an agent attaches to it."""

    def __init__(self, name: str, layout: ExchangeLayout, mapping: mmap.mmap) -> None:
        super().__init__(name)
        self.layout = layout
        self.mapping = mapping
        self.header: npt.NDArray[np.uint32] = np.frombuffer(mapping, np.uint32, LINE_BYTES // 4)

    @classmethod
    def create(cls, layout: ExchangeLayout) -> ExchangeMemory:
        """Creates a segment of zeros with reserved pages. Raises OSError if /dev/shm is too small."""
        with new_segment(layout.num_bytes) as (name, mapping):
            memory = cls(name, layout, mapping)
        memory.has_name = True
        memory.header[: DOWN_WORD + 1] = EXCHANGE_MAGIC, EXCHANGE_VERSION, layout.group_size, 0
        return memory

    @classmethod
    def attach(cls, name: str, layout: ExchangeLayout) -> ExchangeMemory:
        """Maps a segment that the server created. Raises ProtocolError if name, size or header is wrong."""
        memory = cls(name, layout, map_segment(name, layout.num_bytes, "exchange"))
        found = tuple(memory.header[:DOWN_WORD].tolist())
        wanted = (EXCHANGE_MAGIC, EXCHANGE_VERSION, layout.group_size)
        if found != wanted:
            raise ProtocolError(f"the exchange segment begins with {found}; {wanted} was agreed")
        return memory

    def mark_down(self) -> None:
        """Marks the group as failed. Agents that wait in the exchange then end their processes."""
        self.header[DOWN_WORD] = 1

    @property
    def is_down(self) -> bool:
        return bool(self.header[DOWN_WORD])

    def close(self) -> None:
        """Removes the segment's name and this object's views. The mapping ends when no NumPy view of it is left."""
        self.unlink()
        self.header = np.zeros(LINE_BYTES // 4, np.uint32)

