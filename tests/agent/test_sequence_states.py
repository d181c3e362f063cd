"""Tests which states of linear attention the sequences of a step read and write."""

from __future__ import annotations

import numpy as np
import pytest

from agent.sequence_states import SequenceStates
from agent.step_inputs import StepInputs
from llm_serving.errors import ProtocolError


def made(num_rows: int = 4) -> SequenceStates:
    states = SequenceStates(num_rows)
    states.reset()
    return states


def runs(states: SequenceStates, *entries: tuple[int, int, int]) -> list[list[int]]:
    """Assigns a step whose entries are (batch row, first position, number of tokens). Returns its runs."""
    rows, begins, lens = (np.array(column, np.int32) for column in zip(*entries, strict=True))
    empty = np.zeros(0, np.int32)
    tables = np.zeros((rows.size, 0), np.int32)
    states.assign(
        StepInputs(empty, empty, empty, tables, begins + lens, lens, rows, empty, empty, empty, whole_prompts=False)
    )
    assert states.runs[0].tolist() == [states.runs[0, 0], 0, 0, 0]
    return states.runs[1 : 1 + states.runs[0, 0]].tolist()


def test_a_sequence_begins_with_zeros_and_then_reads_what_it_wrote() -> None:
    states = made()
    assert runs(states, (2, 0, 5), (0, 0, 1)) == [[0, 5, -1, 4], [5, 1, -1, 0]]
    assert runs(states, (0, 1, 1), (2, 5, 3)) == [[0, 1, 0, 1], [1, 3, 4, 5]]
    assert runs(states, (2, 8, 1), (0, 2, 1)) == [[0, 1, 5, 4], [1, 1, 1, 0]]


def test_a_step_may_run_again() -> None:
    states = made()
    for step in ((0, 7), (7, 2), (9, 1)):
        first = runs(states, (1, *step))
        assert first[0][2] != first[0][3]
        assert runs(states, (1, *step)) == first


def test_a_new_sequence_never_finds_the_state_of_an_old_one() -> None:
    states = made()
    runs(states, (0, 0, 10))
    runs(states, (0, 10, 1))
    runs(states, (0, 0, 3))
    for position in (10, 11):
        with pytest.raises(ProtocolError, match=rf"batch row 0 at position {position}; its states end at \[3, -1\]"):
            runs(states, (0, position, 1))
    assert runs(states, (0, 3, 1)) == [[0, 1, 0, 1]]


def test_entries_of_one_batch_row_are_one_run() -> None:
    """A step that scores tokens of a prompt has several entries with the same batch row."""
    states = made()
    runs(states, (1, 0, 4), (3, 0, 2))
    assert runs(states, (1, 4, 1), (1, 5, 1), (1, 6, 1), (3, 2, 1)) == [[0, 3, 2, 3], [3, 1, 6, 7]]
    assert runs(states, (3, 3, 1), (1, 7, 1)) == [[0, 1, 7, 6], [1, 1, 3, 2]]
    with pytest.raises(ProtocolError, match="not consecutive positions"):
        runs(states, (1, 8, 1), (1, 10, 1))
    with pytest.raises(ProtocolError, match="the entries of a batch row are not next to each other"):
        runs(states, (1, 8, 1), (3, 4, 1), (1, 9, 1))


def test_a_reset_forgets_all_states_and_ends_the_warm_up() -> None:
    states = SequenceStates(2)
    assert runs(states, (0, 200, 1), (1, 100, 50)) == [[0, 1, -1, 0], [1, 50, -1, 2]]
    assert runs(states, (0, 201, 1)) == [[0, 1, 0, 1]]
    states.reset()
    with pytest.raises(ProtocolError, match="batch row 0 at position 202"):
        runs(states, (0, 202, 1))
