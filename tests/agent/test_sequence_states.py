"""Tests which states of linear attention the sequences of a step read and write."""

from __future__ import annotations

import numpy as np
import pytest

from agent.sequence_states import SequenceStates
from agent.step_inputs import StepInputs
from llm_serving.errors import ProtocolError


def made(num_rows: int = 4, num_snapshots: int = 0, max_logged: int = 0) -> SequenceStates:
    states = SequenceStates(num_rows, num_snapshots, max_logged)
    states.reset()
    return states


Moves = list[tuple[int, int, int]]


def runs(states: SequenceStates, *entries: tuple[int, int, int], moves: Moves | None = None) -> list[list[int]]:
    """Assigns a step whose entries are (batch row, first position, number of tokens). Returns its runs.

    Leaves out the zeros of runs that save no state, and the last two numbers of runs without drafts. ``moves`` are the
    state moves.
    """
    rows, begins, lens = (np.array(column, np.int32) for column in zip(*entries, strict=True))
    empty = np.zeros(0, np.int32)
    tables = np.zeros((rows.size, 0), np.int32)
    state_moves = np.array(moves or [], np.int32).reshape(-1, 3)
    states.assign(
        StepInputs(
            *(empty, empty, empty, tables, begins + lens, lens, rows, empty, empty, empty),
            whole_prompts=False,
            state_moves=state_moves,
        )
    )
    assert not states.runs[0, 1:].any()
    found: list[list[int]] = states.runs[1 : 1 + states.runs[0, 0]].tolist()
    shorter = []
    for run in found:
        drafts = [] if (run[8], run[9]) == (0, run[1]) else run[8:]
        shorter.append([*run[: 8 if run[6] else 6 if run[4] else 4], *drafts])
    return shorter


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
        problem = f"batch row 0 at position {position}; its states continue at 3 to 3 and -1 to -1"
        with pytest.raises(ProtocolError, match=problem):
            runs(states, (0, position, 1))
    assert runs(states, (0, 3, 1)) == [[0, 1, 0, 1]]


def test_entries_of_one_batch_row_are_one_run() -> None:
    """Entries of one batch row form one run. There is no log here, so all drafts must be right, as in a scored prompt.
    """
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


def test_a_step_saves_states_in_snapshots_and_another_sequence_resumes_from_them() -> None:
    """The four batch rows have the states 0 to 7, so snapshot 0 is state 8."""
    states = made(num_snapshots=3)
    saved = runs(states, (2, 0, 20), (0, 0, 4), moves=[(0, 16, 1), (1, 4, 2), (0, 8, 0)])
    assert saved == [[0, 20, -1, 4, 8, 8, 16, 9], [20, 4, -1, 0, 4, 10]]
    assert runs(states, (2, 20, 1)) == [[0, 1, 4, 5]], "the runs of the next step save nothing"
    resumed = [(0, 0, 1)]
    for _ in range(2):
        assert runs(states, (1, 16, 3), moves=resumed) == [[0, 3, 9, 2]]
    assert runs(states, (1, 19, 1), (3, 16, 1), moves=[(1, 0, 1)]) == [[0, 1, 2, 3], [1, 1, 9, 6]]


def test_a_resumed_sequence_ignores_the_states_of_its_batch_row() -> None:
    states = made(num_snapshots=1)
    runs(states, (0, 0, 8), moves=[(0, 8, 0)])
    assert runs(states, (0, 8, 5), moves=[(0, 0, 0)]) == [[0, 5, 8, 0]]
    with pytest.raises(ProtocolError, match="batch row 0 at position 8; its states continue at 13 to 13"):
        runs(states, (0, 8, 1))


@pytest.mark.parametrize(
    ("entries", "moves", "problem"),
    [
        ([(1, 9, 1)], [(0, 0, 0)], "position 9 from snapshot 0, which ends at 8"),
        ([(1, 8, 1)], [(0, 0, 1)], "position 8 from snapshot 1, which ends at -1"),
        ([(1, 8, 1)], [(0, 0, 3)], "state moves: snapshots holds 3"),
        ([(1, 8, 1)], [(1, 0, 0)], "state moves: entries holds 1"),
        ([(1, 8, 1), (2, 0, 4)], [(0, 0, 0), (1, 4, 0)], "it also reads or saves for another sequence"),
        ([(1, 0, 4), (2, 0, 4)], [(0, 4, 1), (1, 4, 1)], "it also reads or saves for another sequence"),
        ([(1, 0, 4)], [(0, 5, 1)], "after 5 of 4 tokens"),
        ([(1, 0, 4)], [(0, -1, 1)], "after -1 of 4 tokens"),
        ([(1, 0, 4)], [(0, 1, 1), (0, 2, 0), (0, 3, 2)], "the state of a sequence more than 2 times"),
        ([(1, 8, 1), (1, 9, 1)], [(1, 0, 0)], "0 resumes a sequence, which needs its first entry"),
        ([(1, 8, 1), (1, 9, 1)], [(0, 0, 0), (1, 2, 1)], "after 2 of 1 tokens"),
    ],
)
def test_wrong_state_moves_are_refused(entries: list[tuple[int, int, int]], moves: Moves, problem: str) -> None:
    states = made(num_snapshots=3)
    runs(states, (0, 0, 8), moves=[(0, 8, 0)])
    with pytest.raises(ProtocolError, match=problem):
        runs(states, *entries, moves=moves)


DRAFTS = [(1, 10, 1), (1, 11, 1), (1, 12, 1)]
"""The entries of a sequence with two drafts."""


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_step_after_drafts_replays_the_accepted_ones(accepted: int) -> None:
    states = made(max_logged=4)
    runs(states, (1, 0, 10))
    for _ in range(2):
        assert runs(states, *DRAFTS, (3, 0, 1)) == [[0, 3, 2, 3, 0, 1], [3, 1, -1, 6]]
    begin = 11 + accepted
    expected = [0, 1, 3, 2, accepted, 1] if accepted else [0, 1, 3, 2]
    for _ in range(2):
        assert runs(states, (1, begin, 1)) == [expected]
    assert runs(states, (1, begin + 1, 1), (1, begin + 2, 1)) == [[0, 2, 2, 3, 0, 1]]
    assert runs(states, (1, begin + 3, 1)) == [[0, 1, 3, 2, 1, 1]]


def test_the_state_before_drafts_and_their_log_are_read_only_once() -> None:
    states = made(max_logged=4)
    runs(states, (1, 0, 10))
    runs(states, *DRAFTS)
    runs(states, (1, 12, 1))
    for begin in (10, 11, 14):
        with pytest.raises(ProtocolError, match="its states continue at 13 to 13 and 12 to 12"):
            runs(states, (1, begin, 1))


def test_all_but_the_last_drafts_of_a_long_run_are_settled() -> None:
    states = made(max_logged=2)
    runs(states, (0, 0, 4))
    assert runs(states, *((0, 4 + place, 1) for place in range(7))) == [[0, 7, 0, 1, 0, 5]]
    with pytest.raises(ProtocolError, match="its states continue at 4 to 4 and 9 to 11"):
        runs(states, (0, 8, 1))
    assert runs(states, (0, 10, 1)) == [[0, 1, 1, 0, 1, 1]]


def test_a_draft_may_end_with_a_snapshot_and_a_resumed_sequence_may_have_drafts() -> None:
    states = made(num_snapshots=2, max_logged=4)
    runs(states, (1, 0, 10))
    assert runs(states, (0, 0, 3), *DRAFTS, moves=[(2, 1, 1)])[1] == [3, 3, 2, 3, 2, 9, 0, 1]
    assert runs(states, *((2, 12 + place, 1) for place in range(3)), moves=[(0, 0, 1)]) == [[0, 3, 9, 4, 0, 1]]


def test_a_reset_forgets_all_snapshots() -> None:
    states = made(num_snapshots=1)
    runs(states, (0, 0, 8), moves=[(0, 8, 0)])
    states.reset()
    with pytest.raises(ProtocolError, match="from snapshot 0, which ends at -1"):
        runs(states, (1, 8, 1), moves=[(0, 0, 0)])
