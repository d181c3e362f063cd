"""Tests the state that an agent keeps for each batch row. The tests need no model."""

from __future__ import annotations

import numpy as np
import pytest

from agent.sampler import RowTable
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import SlotLayout, SlotLimits, StepSlot

LAYOUT = SlotLayout.of(SlotLimits(max_tokens=16, max_seqs=4, max_blocks_per_seq=2, max_context=16))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def table() -> RowTable:
    return RowTable(num_rows=8, max_model_len=15, vocab_size=100)


def slot_with_history(rows: list[int], histories: list[list[int]], prompt_lens: list[int]) -> StepSlot:
    slot = StepSlot(LAYOUT, bytearray(LAYOUT.slot_bytes))
    flat = [token for history in histories for token in history]
    slot.rows[: len(rows)] = rows
    slot.history_lens[: len(rows)] = [len(history) for history in histories]
    slot.history_prompt_lens[: len(rows)] = prompt_lens
    slot.history[: len(flat)] = flat
    slot.write_header(1, num_tokens=len(rows), num_seqs=len(rows), table_width=1, history_len=len(flat))
    return slot


def test_reset_forgets(table: RowTable) -> None:
    table.start_rows(slot_with_history([1], [[7, 8]], [2]))
    table.append(ids(1), ids(9))
    table.last_token[1] = 9
    table.reset()
    assert table.history_len.tolist() == [0] * 8
    assert (table.last_token < 0).all()


def test_histories_start_and_grow(table: RowTable) -> None:
    table.start_rows(slot_with_history([6, 0, 3], [[1, 2, 3], [], [4]], [2, 0, 1]))
    table.append(ids(6, 3), ids(10, 12))
    assert table.history[6, :4].tolist() == [1, 2, 3, 10]
    assert table.history[3, :2].tolist() == [4, 12]
    assert table.history_len[[6, 0, 3]].tolist() == [4, 0, 2]
    assert table.prompt_len[[6, 3]].tolist() == [2, 1]


def test_a_started_row_loses_its_old_history(table: RowTable) -> None:
    table.start_rows(slot_with_history([6], [[1, 2, 3]], [3]))
    table.start_rows(slot_with_history([6], [[9]], [1]))
    assert table.history_len[6] == 1
    assert table.history[6, 0] == 9


@pytest.mark.parametrize(
    ("history", "prompt_len"),
    [([100], 1), ([-1], 1), ([1], 2), ([1], -1)],
    ids=["vocabulary", "negative", "longer", "minus"],
)
def test_an_invalid_history_is_refused(table: RowTable, history: list[int], prompt_len: int) -> None:
    with pytest.raises(ProtocolError):
        table.start_rows(slot_with_history([0], [history], [prompt_len]))


def test_a_history_longer_than_sent_is_refused(table: RowTable) -> None:
    slot = slot_with_history([0], [[1, 2]], [1])
    slot.history_lens[0] = 3
    with pytest.raises(ProtocolError, match="do not fit its history"):
        table.start_rows(slot)
