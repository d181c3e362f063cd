"""Keeps the states of sequences for linear attention. Each batch row has states of fixed size in each layer with linear
attention.

In a layer, a batch row has two states. A step reads the state that ends where the step begins, and writes the other
one. So a step can run twice with the same result, which the row check, the replays and the recovery from a failed graph
need. A sequence begins with a state of zeros, so a batch row needs no reset for a new sequence.

Snapshots are further states, which belong to no batch row. A step can save the states at the ends of blocks in
snapshots. A later sequence with the same first tokens can resume there. Its first step reads the snapshot instead of a
state of its batch row. The server decides which snapshot has which state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.step_inputs import Int32Array, StepInputs, check_range
from llm_serving.errors import ProtocolError

STATES_PER_ROW = 2
SAVES_PER_RUN = 2
"""Maximum number of snapshots that a run saves (``kDeltaSaves`` of ``agent/kernels/ops/gated_delta.h``)."""
RUN_WIDTH = 4 + 2 * SAVES_PER_RUN
_NONE = -1
_Ints = npt.NDArray[np.int64]


class SequenceStates:
    """Decides which state each sequence of a step reads and writes. The operators compute the states.

    A run is all tokens of one batch row in a step. If a step scores the tokens of a prompt, it has several consecutive
    entries with the same batch row. These entries are one run.
    """

    def __init__(self, num_rows: int, num_snapshots: int = 0) -> None:
        """``num_rows`` is the number of batch rows. The states of batch rows have the first numbers, the snapshots
        follow.
        """
        self.runs: Int32Array = np.zeros((num_rows + 1, RUN_WIDTH), np.int32)
        """[num_rows + 1, RUN_WIDTH]: a row with the number of runs and zeros, then a row for each run.

        The row of a run has its first token, its number of tokens, the state to read (-1: zeros) and the state to
        write. Then two numbers follow for each snapshot that the run saves. The first is the number of tokens of the
        run after which the state is saved. The second is the state to save it in. Zeros stand for no snapshot. Graphs
        read this memory directly.
        """
        self._ends: _Ints = np.full((num_rows, STATES_PER_ROW), _NONE, np.int64)
        self._snapshot_ends: _Ints = np.full(num_snapshots, _NONE, np.int64)
        self._is_warm_up = True

    @property
    def num_states(self) -> int:
        return self._ends.size + self._snapshot_ends.size

    def reset(self) -> None:
        """Forgets all states. Before the first call, sequences may begin at any position without a state, because the
        steps of the warm-up do so.
        """
        self._ends[:] = _NONE
        self._snapshot_ends[:] = _NONE
        self._is_warm_up = False

    def assign(self, inputs: StepInputs) -> None:
        """Fills ``runs`` for a step: which state each sequence reads, and which states the step writes.

        If the same step is assigned again, it gets the same runs. A sequence whose tokens begin at position n > 0 needs
        the state after n tokens. The state is in the batch row of the sequence, or in the snapshot that the step names.
        Raises ProtocolError if the state does not exist, or if the step saves a state that it does not compute.
        """
        rows, lens, begins, firsts = _runs_of(inputs)
        ends = self._ends[rows]
        found = ends == begins[:, None]
        has_state = found.any(axis=1) & (begins > 0)
        resumed = self._resumed(inputs.state_moves, begins)
        known = has_state | (begins == 0) | (resumed != _NONE)
        if not known.all() and not self._is_warm_up:
            raise _no_state(rows, begins, ends, int(np.argmin(known)))
        has_state &= resumed == _NONE
        read = np.where(has_state, found.argmax(axis=1), _NONE)
        write = np.where(has_state, 1 - read, 0)
        runs = self.runs[1 : 1 + rows.size]
        runs[:, 4:] = 0
        self._save(inputs.state_moves, runs, lens, begins)
        self._ends[rows, 1 - write] = np.where(has_state, begins, _NONE)
        self._ends[rows, write] = begins + lens
        runs[:, 0], runs[:, 1] = firsts, lens
        runs[:, 2] = np.where(has_state, STATES_PER_ROW * rows + read, np.where(resumed < 0, _NONE, resumed))
        runs[:, 3] = STATES_PER_ROW * rows + write
        self.runs[0, 0] = rows.size

    def _resumed(self, moves: Int32Array, begins: _Ints) -> _Ints:
        """Returns for each run the number of the snapshot's state from which it resumes, or -1."""
        resumed = np.full(begins.size, _NONE, np.int64)
        if not moves.size:
            return resumed
        check_range("state moves: runs", moves[:, 0], 0, begins.size)
        check_range("state moves: snapshots", moves[:, 2], 0, self._snapshot_ends.size)
        for run, _, snapshot in moves[moves[:, 1] == 0].tolist():
            if self._snapshot_ends[snapshot] != begins[run]:
                raise ProtocolError(
                    f"a step resumes a sequence at position {begins[run]} from snapshot {snapshot}, which ends at "
                    f"{self._snapshot_ends[snapshot]}"
                )
            resumed[run] = self._ends.size + snapshot
        return resumed

    def _save(self, moves: Int32Array, runs: Int32Array, lens: _Ints, begins: _Ints) -> None:
        """Adds the snapshots that the step saves to ``runs``, in ascending order of tokens."""
        for run, after, snapshot in sorted(moves[moves[:, 1] != 0].tolist()):
            free = np.flatnonzero(runs[run, 4::2] == 0)
            if not 0 < after <= lens[run] or not free.size:
                raise ProtocolError(
                    f"a step saves the state after {after} of {lens[run]} tokens of a sequence; a sequence saves at "
                    f"most {SAVES_PER_RUN} states, after its tokens"
                )
            place = 4 + 2 * int(free[0])
            runs[run, place : place + 2] = after, self._ends.size + snapshot
            self._snapshot_ends[snapshot] = begins[run] + after


def _runs_of(inputs: StepInputs) -> tuple[_Ints, ...]:
    """Returns four arrays with an element for each run: batch row, number of tokens, first position and first token."""
    rows, lens = inputs.rows.astype(np.int64), inputs.query_lens.astype(np.int64)
    begins, firsts = inputs.context_lens - lens, np.cumsum(lens) - lens
    is_first = np.ones(rows.size, np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    starts = np.flatnonzero(is_first)
    if np.unique(rows).size != starts.size:
        raise ProtocolError("the entries of a batch row are not next to each other in a step")
    if starts.size == rows.size:
        return rows, lens, begins, firsts
    joins = ~is_first[1:]
    if (begins[1:] != begins[:-1] + lens[:-1])[joins].any():
        raise ProtocolError("entries of a step with the same batch row are not consecutive positions")
    if inputs.state_moves.size:
        raise ProtocolError("a step that scores tokens resumes no sequence and saves no states")
    return rows[starts], np.add.reduceat(lens, starts), begins[starts], firsts[starts]


def _no_state(rows: _Ints, begins: _Ints, ends: _Ints, index: int) -> ProtocolError:
    return ProtocolError(
        f"a step continues batch row {rows[index]} at position {begins[index]}; its states end at "
        f"{ends[index].tolist()}"
    )
