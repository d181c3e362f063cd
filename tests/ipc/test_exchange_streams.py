"""Tests which parts of an exchange are copied between machines, and in which order."""

from __future__ import annotations

import pytest

from llm_serving.ipc.exchange import COLLECTIVE_BYTES, RING_STEPS, TOKEN_PLACES, ExchangeLayout
from llm_serving.ipc.exchange_streams import Stream, streams_of

SIZES = [(2, 1), (1, 2), (3, 1), (2, 2), (2, 3), (1, 4)]


def layout_of(tp: int, pp: int) -> ExchangeLayout:
    return ExchangeLayout(tp, pp, hidden_size=64, max_tokens=16, max_rows=4)


def stream_at(streams: list[Stream], line: int) -> Stream:
    [found] = [stream for stream in streams if stream.line == line]
    return found


@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_every_counter_has_a_stream_with_its_writer_and_its_readers(tp: int, pp: int) -> None:
    layout, size = layout_of(tp, pp), tp * pp
    streams, group = streams_of(layout), frozenset(range(size))
    for member in range(size):
        stage = member // tp
        arrival = stream_at(streams, layout.arrival_line(member))
        assert (arrival.writer, arrival.readers, arrival.num_places) == (member, group - {member}, 0)
        if tp > 1:
            sums = stream_at(streams, layout.collective_line(member))
            assert (sums.writer, sums.readers) == (member, frozenset(range(stage * tp, stage * tp + tp)) - {member})
            assert sums.place_bytes == COLLECTIVE_BYTES
        if stage > 0:
            read = stream_at(streams, layout.ring_read_line(member))
            assert (read.writer, read.readers) == (member, {(stage - 1) * tp})
    for border in range(pp - 1):
        ring = stream_at(streams, layout.ring_written_line(border))
        assert (ring.writer, ring.readers) == (border * tp, frozenset(range((border + 1) * tp, (border + 2) * tp)))
        assert [ring.place(step + 1) for step in range(3)] == [
            layout.ring(border) + step % RING_STEPS * layout.ring_step_bytes for step in range(3)
        ]
    tokens = stream_at(streams, layout.token_line)
    assert (tokens.writer, tokens.readers) == (size - tp, group - {size - tp})
    assert [tokens.place(step + 1) for step in range(3)] == [
        layout.tokens + step % TOKEN_PLACES * layout.token_place_bytes for step in range(3)
    ]
    assert len(streams) == size + 1 + (size if tp > 1 else 0) + (pp - 1) * (1 + tp)


def test_pieces_of_sums_are_where_the_kernels_put_them() -> None:
    layout = layout_of(3, 2)
    sums = stream_at(streams_of(layout), layout.collective_line(4))
    own = layout.collective_buffers + 4 * layout.collective_member_bytes
    assert [sums.place(value) for value in (2, 3, 4)] == [own, own + COLLECTIVE_BYTES, own]


def test_every_piece_is_copied_in_order_but_only_the_newest_of_counters() -> None:
    layout = layout_of(2, 2)
    streams = streams_of(layout)
    ring = stream_at(streams, layout.ring_written_line(0))
    assert list(ring.values_after(6, 7)) == [7]
    assert list(ring.values_after(6, 8)) == [7, 8]
    assert list(ring.values_after(0xFFFFFFFF, 1)) == [0, 1], "counters wrap around"
    for line in (layout.arrival_line(1), layout.ring_read_line(2)):
        assert list(stream_at(streams, line).values_after(3, 9)) == [9]
    assert list(stream_at(streams, layout.token_line).values_after(3, 9)) == [8, 9], "the places of the last two steps"
