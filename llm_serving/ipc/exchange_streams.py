"""The parts of an exchange that one agent writes and other agents read, for groups that span several machines.

Each machine has an exchange of its own. A *stream* is a counter of the exchange with the data that the counter
announces. If the writer of a stream and one of its readers are on different machines, the stream is copied
(``llm_serving/agent_host/exchange_bridge.py``).

A stream has a fixed number of *places*, which hold one piece of data each and are used in turn. The writer waits for
its readers before it uses a place again. So a piece that was not copied yet is never overwritten. The stream of sampled
tokens is different: its writer does not wait. ``agent.group.exchange.Exchange.post_tokens`` says why no agent misses a
token that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llm_serving.ipc.exchange import COLLECTIVE_BUFFERS, COLLECTIVE_BYTES, RING_STEPS, TOKEN_PLACES, ExchangeLayout

_COUNTERS = 1 << 32
"""Number of values of a counter of the exchange. The next value after the largest one is 0."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A counter of the exchange, and the places of the pieces that it announces."""

    line: int
    """Offset of the counter's flag line."""
    writer: int
    """Number of the agent in the group that increments the counter."""
    readers: frozenset[int]
    """Numbers of the agents that wait for the counter."""
    num_places: int = 0
    """Number of places for pieces. 0 for a counter without data.

    Each piece goes to the next place. After the last place, the first one follows.
    """
    data: int = 0
    """Offset of the first place. The other places follow."""
    place_bytes: int = 0
    first: int = 0
    """A value of the counter that announces a piece in the first place."""

    def place(self, value: int) -> int:
        """Returns the offset of the piece that the counter announced with ``value``. The stream must have places."""
        return self.data + (value - self.first) % self.num_places * self.place_bytes

    def values_after(self, copied: int, value: int) -> Iterable[int]:
        """Returns the values of the counter that must be copied to the other machine, in order, each with its piece.

        ``copied`` is the value that was copied last. ``value`` is the present value, and the last in the result. For a
        stream without data, the result is only the present value.
        """
        count = min((value - copied) % _COUNTERS, max(1, self.num_places))
        return [(value - behind) % _COUNTERS for behind in reversed(range(count))]


def streams_of(layout: ExchangeLayout) -> list[Stream]:
    """Returns all streams of an exchange. Their order depends on the layout only, so all machines number them alike."""
    size, width = layout.group_size, layout.tensor_parallel
    group = frozenset(range(size))
    stages = [frozenset(range(first, first + width)) for first in range(0, size, width)]
    found = [Stream(layout.arrival_line(member), member, group - {member}) for member in range(size)]
    for border in range(layout.pipeline_parallel - 1):
        writer, readers = border * width, stages[border + 1]
        ring = (RING_STEPS, layout.ring(border), layout.ring_step_bytes)
        found.append(Stream(layout.ring_written_line(border), writer, readers, *ring, first=1))
        found += [Stream(layout.ring_read_line(reader), reader, frozenset({writer})) for reader in sorted(readers)]
    for member in range(size) if width > 1 else ():
        buffers = layout.collective_buffers + member * layout.collective_member_bytes
        pieces = (COLLECTIVE_BUFFERS, buffers, COLLECTIVE_BYTES)
        found.append(Stream(layout.collective_line(member), member, stages[member // width] - {member}, *pieces))
    sampler = size - width
    tokens = (TOKEN_PLACES, layout.tokens, layout.token_place_bytes)
    found.append(Stream(layout.token_line, sampler, group - {sampler}, *tokens, first=1))
    return found
