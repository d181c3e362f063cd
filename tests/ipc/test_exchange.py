"""Tests the exchange of a group: its layout, and the checks that an agent makes before it maps the memory."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from llm_serving.config import ParallelConfig
from llm_serving.errors import ProtocolError
from llm_serving.ipc.exchange import (
    COLLECTIVE_BUFFERS,
    COLLECTIVE_BYTES,
    LINE_BYTES,
    RING_STEPS,
    TOKEN_PLACES,
    ExchangeLayout,
    ExchangeMemory,
    exchange_bytes,
)
from llm_serving.ipc.shm import SlotLimits
from support.some_machine import SHAPE

LIMITS = SlotLimits(max_tokens=300, max_seqs=9, max_blocks_per_seq=4)
SIZES = [(2, 1), (1, 2), (3, 1), (2, 2), (2, 3), (1, 4)]


def layout_of(tp: int, pp: int) -> ExchangeLayout:
    return ExchangeLayout.of(SHAPE, LIMITS, ParallelConfig(tp, pp, 1))


@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_areas_of_the_exchange_do_not_overlap(tp: int, pp: int) -> None:
    layout, size = layout_of(tp, pp), tp * pp
    lines = [0, layout.token_line, layout.bell_line]
    lines += [place(member) for member in range(size) for place in (layout.collective_line, layout.arrival_line)]
    lines += [layout.ring_read_line(member) for member in range(size)]
    lines += [layout.ring_written_line(border) for border in range(pp - 1)]
    regions = [(line, line + LINE_BYTES) for line in lines]
    regions.append((layout.tokens, layout.tokens + TOKEN_PLACES * 2 * 4 * LIMITS.max_seqs))
    if tp > 1:
        each = COLLECTIVE_BUFFERS * COLLECTIVE_BYTES
        starts = [layout.collective_buffers + member * layout.collective_member_bytes for member in range(size)]
        regions += [(start, start + each) for start in starts]
    for border in range(pp - 1):
        step = LIMITS.max_tokens * SHAPE.hidden_size * 4
        starts = [layout.ring(border) + number * layout.ring_step_bytes for number in range(RING_STEPS)]
        regions += [(start, start + step) for start in starts]
    regions.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(regions))
    assert regions[-1][1] <= layout.num_bytes
    assert all(line % LINE_BYTES == 0 for line in lines)


def test_sizes_of_the_exchange() -> None:
    assert exchange_bytes(SHAPE, LIMITS, ParallelConfig(1, 1, 1)) == 0
    assert exchange_bytes(SHAPE, LIMITS, ParallelConfig(1, 1, 4)) == 0, "replicas exchange nothing"
    ring = RING_STEPS * -(-300 * SHAPE.hidden_size * 4 // 4096) * 4096
    assert exchange_bytes(SHAPE, LIMITS, ParallelConfig(1, 2, 1)) == 4096 + ring
    buffers = COLLECTIVE_BUFFERS * COLLECTIVE_BYTES
    assert exchange_bytes(SHAPE, LIMITS, ParallelConfig(2, 1, 1)) == 4096 + 2 * buffers
    assert exchange_bytes(SHAPE, LIMITS, ParallelConfig(2, 2, 8)) == 4096 + 4 * buffers + ring


def test_an_agent_reads_the_servers_data_after_the_name_is_unlinked() -> None:
    created = ExchangeMemory.create(layout_of(2, 2))
    attached = ExchangeMemory.attach(created.name, layout_of(2, 2))
    created.unlink()
    assert not Path("/dev/shm", created.name).exists()
    assert not attached.is_down
    created.mark_down()
    assert attached.is_down
    attached.close()
    created.close()


def test_a_segment_with_another_header_or_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="is not a name of an exchange segment"):
        ExchangeMemory.attach("llm-serving-../../etc/passwd", layout_of(2, 1))
    memory = ExchangeMemory.create(layout_of(2, 1))
    try:
        with pytest.raises(ProtocolError, match=r"has \d+ bytes, the layout needs \d+"):
            ExchangeMemory.attach(memory.name, layout_of(3, 1))
        memory.header[1] = 77
        with pytest.raises(ProtocolError, match="begins with"):
            ExchangeMemory.attach(memory.name, layout_of(2, 1))
    finally:
        memory.close()
    assert not Path("/dev/shm", memory.name).exists()


def test_pages_of_the_exchange_are_reserved_at_the_start() -> None:
    """The memory of the exchange is reserved at the start of the group, so a full /dev/shm is an error then.

    Otherwise it would be an error during a step.
    """
    memory = ExchangeMemory.create(layout_of(2, 1))
    try:
        status = os.stat(Path("/dev/shm", memory.name))
        assert status.st_blocks * 512 >= memory.layout.num_bytes
        assert not np.frombuffer(memory.mapping, np.uint8)[LINE_BYTES:].any()
    finally:
        memory.close()
