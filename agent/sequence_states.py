"""Keeps the states of sequences for linear attention. Each batch row has states of fixed size in each layer with linear
attention.

In a layer, a batch row has memory for two states. A step reads the state that the previous step has written, and writes
its own state into the other memory. So a step can run twice with the same result. The row check, the replays and the
recovery from a failed graph need this. A sequence begins with a state of zeros, so a batch row needs no reset for a new
sequence.

A step may verify drafts, and some of them may be rejected. The step then writes the state before the first draft, and a
log with the inputs of each draft (``agent/kernels/ops/gated_delta.h``). The sequence's next step reads this state and
first replays the accepted drafts from the log. So no state contains a rejected draft.

Snapshots are further states, which belong to no batch row. A step can save the state at the end of a block in a
snapshot. A later sequence with the same first tokens can resume after this block. Its first step reads the snapshot
instead of a state of its batch row. The server decides which snapshot has which state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.step_inputs import Int32Array, StepInputs, check_range
from llm_serving.errors import ProtocolError

STATES_PER_ROW = 2
"""Number of states that each batch row has in a layer with linear attention."""
SAVES_PER_RUN = 2
"""Maximum number of snapshots that a run saves (``kDeltaSaves`` of ``agent/kernels/ops/gated_delta.h``)."""
_SAVES, _REPLAYED, _SETTLED = 4, 4 + 2 * SAVES_PER_RUN, 5 + 2 * SAVES_PER_RUN
"""Columns of ``SequenceStates.runs``: ``_SAVES`` is the first column of the saved snapshots. ``_REPLAYED`` has the
number of replayed drafts, and ``_SETTLED`` the number of tokens before the first draft."""
RUN_WIDTH = 6 + 2 * SAVES_PER_RUN
"""Columns of the array that describes the runs of a step."""
_NONE = -1
_Ints = npt.NDArray[np.int64]


class SequenceStates:
    """Decides which state each sequence of a step reads and writes. The operators compute the states.

    A run is all tokens of one batch row in a step. A step that verifies drafts lists each draft like a sequence of one
    token, with the same batch row. The last known token and the drafts of a batch row are one run.
    """

    def __init__(self, num_rows: int, num_snapshots: int = 0, max_logged: int = 0) -> None:
        """``num_rows`` is the number of batch rows. States are numbered: first those of the batch rows, then the
        snapshots.

        ``max_logged`` is the maximum number of drafts in the log of a state. If a step has more drafts of a sequence,
        only the last ``max_logged`` are logged. The drafts before them cannot be rejected. The server sends more drafts
        only to score a prompt, whose tokens are known.
        """
        self.max_logged = max_logged
        self.runs: Int32Array = np.zeros((num_rows + 1, RUN_WIDTH), np.int32)
        """[num_rows + 1, RUN_WIDTH]: a row with the number of runs and zeros, then a row for each run.

        The row of a run has these numbers. Graphs read them directly.

        - The index of the run's first token in the step, and the number of its tokens.
        - The state to read (-1: a state of zeros), and the state to write.
        - For each of ``SAVES_PER_RUN`` snapshots: the number of tokens of the run after which the state is saved, and
          the state to save it in. Two zeros mean no snapshot.
        - The number of drafts to replay from the log of the state that is read.
        - The number of tokens before the run's first logged draft.
        """
        self._ends: _Ints = np.full((num_rows, STATES_PER_ROW), _NONE, np.int64)
        self._nexts: _Ints = np.full((num_rows, STATES_PER_ROW, 2), _NONE, np.int64)
        """For each batch row and state: a range of positions, as its first and last position. A step may read the state
        if it begins in this range.
        """
        self._snapshot_ends: _Ints = np.full(num_snapshots, _NONE, np.int64)
        self._is_warm_up = True

    @property
    def num_states(self) -> int:
        return self._ends.size + self._snapshot_ends.size

    def reset(self) -> None:
        """Forgets all states. Before the first call, a sequence may begin at any position without a state, because the
        steps of the warm-up begin at large positions.
        """
        self._ends[:] = _NONE
        self._nexts[:] = _NONE
        self._snapshot_ends[:] = _NONE
        self._is_warm_up = False

    def assign(self, inputs: StepInputs) -> None:
        """Fills ``runs`` for a step: the state that each sequence reads, and the states that the step writes.

        A second call for the same step gives the same runs. A sequence whose tokens begin at position n > 0 reads the
        state after n tokens. This state is in its batch row, or in the snapshot that the step names. Raises
        ProtocolError if this state does not exist, or if the step saves a state that it does not compute.
        """
        step = _runs_of(inputs, self.max_logged)
        rows, begins = step.rows, step.begins
        nexts, moves = self._nexts[rows], step.with_runs(inputs.state_moves)
        found = (nexts[:, :, 0] <= begins[:, None]) & (begins[:, None] <= nexts[:, :, 1])
        has_state = found.any(axis=1) & (begins > 0)
        resumed = self._resumed(moves, begins)
        known = has_state | (begins == 0) | (resumed != _NONE)
        if not known.all() and not self._is_warm_up:
            raise _no_state(rows, begins, nexts, int(np.argmin(known)))
        has_state &= resumed == _NONE
        read = np.where(has_state, found.argmax(axis=1), _NONE)
        write = np.where(has_state, 1 - read, 0)
        runs = self.runs[1 : 1 + rows.size]
        runs[:, _SAVES:] = 0
        if moves.size:
            self._save(moves, runs, begins)
        runs[:, 0], runs[:, 1] = step.firsts, step.lens
        runs[:, 2] = np.where(has_state, STATES_PER_ROW * rows + read, np.where(resumed < 0, _NONE, resumed))
        runs[:, 3] = STATES_PER_ROW * rows + write
        runs[:, _REPLAYED] = np.where(has_state, begins - self._ends[rows, read], 0)
        runs[:, _SETTLED] = step.settled
        self.runs[0, 0] = rows.size
        # This step may read its states again if it is repeated. From now on, no other step may read them.
        self._nexts[rows, 1 - write] = np.where(has_state, begins, _NONE)[:, None]
        self._ends[rows, write] = begins + step.settled
        self._nexts[rows, write] = np.stack([begins + step.settled, begins + step.lens], axis=1)

    def _resumed(self, moves: Int32Array, begins: _Ints) -> _Ints:
        """Returns, for each run, the index of the snapshot state from which the run resumes, or -1."""
        resumed = np.full(begins.size, _NONE, np.int64)
        if not moves.size:
            return resumed
        check_range("state moves: snapshots", moves[:, 2], 0, self._snapshot_ends.size)
        for run, _, snapshot in moves[moves[:, 1] == 0].tolist():
            if self._snapshot_ends[snapshot] != begins[run]:
                raise ProtocolError(
                    f"a step resumes a sequence at position {begins[run]} from snapshot {snapshot}, which ends at "
                    f"{self._snapshot_ends[snapshot]}"
                )
            resumed[run] = self._ends.size + snapshot
        return resumed

    def _save(self, moves: Int32Array, runs: Int32Array, begins: _Ints) -> None:
        """Writes into ``runs`` which snapshots the step saves. The snapshots of a run are ordered by the number of
        tokens after which they are saved.
        """
        is_save = moves[:, 1] != 0
        saved = moves[is_save, 2]
        if np.unique(saved).size < saved.size or np.isin(saved, moves[~is_save, 2]).any():
            raise ProtocolError("a step saves a state in a snapshot that it also reads or saves for another sequence")
        for run, after, snapshot in sorted(moves[is_save].tolist()):
            free = np.flatnonzero(runs[run, _SAVES:_REPLAYED:2] == 0)
            if not free.size:
                raise ProtocolError(f"a step saves the state of a sequence more than {SAVES_PER_RUN} times")
            place = _SAVES + 2 * int(free[0])
            runs[run, place : place + 2] = after, self._ends.size + snapshot
            self._snapshot_ends[snapshot] = begins[run] + after


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of a step. An entry of the step is a sequence, or a draft that the step lists like a sequence.

    ``rows``, ``lens``, ``begins``, ``firsts`` and ``settled`` have an element for each run. ``entry_lens``, ``run_of``
    and ``place`` have an element for each entry.
    """

    rows: _Ints
    """The batch row of each run."""
    lens: _Ints
    """The number of tokens of each run."""
    begins: _Ints
    """The position of each run's first token in its sequence."""
    firsts: _Ints
    """The index of each run's first token among the tokens of the step."""
    settled: _Ints
    """The number of tokens of each run before its first logged draft."""
    entry_lens: _Ints
    """The number of tokens of each entry."""
    run_of: _Ints
    """The index of the run to which each entry belongs."""
    place: _Ints
    """The number of tokens of the same run that come before the entry."""

    def with_runs(self, moves: Int32Array) -> Int32Array:
        """Converts the state moves of a step: replaces the index of an entry by the index of its run.

        ``moves`` and the result are [state moves, 3], as ``StepInputs.state_moves`` describes. In the result, the
        number of tokens after which a state is saved counts from the first token of the run. Raises ProtocolError if a
        move names an entry or tokens that the step does not have.
        """
        if not moves.size:
            return moves
        entries, after = moves[:, 0], moves[:, 1]
        check_range("state moves: entries", entries, 0, self.run_of.size)
        place, lens = self.place[entries], self.entry_lens[entries]
        wrong = (after < 0) | (after > lens) | ((after == 0) & (place > 0))
        if wrong.any():
            index = int(np.argmax(wrong))
            raise ProtocolError(
                f"a step saves the state after {after[index]} of {lens[index]} tokens of an entry; it can save states "
                "after the entry's tokens, and 0 resumes a sequence, which needs its first entry"
            )
        changed = moves.copy()
        changed[:, 0], changed[:, 1] = self.run_of[entries], place + after
        return changed


def _runs_of(inputs: StepInputs, max_logged: int) -> _Runs:
    """Divides a step into runs. ``max_logged`` is the maximum number of drafts in the log of a state."""
    rows, lens = inputs.rows.astype(np.int64), inputs.query_lens.astype(np.int64)
    begins, firsts = inputs.context_lens - lens, np.cumsum(lens) - lens
    is_first = np.ones(rows.size, np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    starts = np.flatnonzero(is_first)
    if np.unique(rows).size != starts.size:
        raise ProtocolError("the entries of a batch row are not next to each other in a step")
    run_of = np.cumsum(is_first) - 1
    place = firsts - firsts[starts][run_of]
    if starts.size == rows.size:
        return _Runs(rows, lens, begins, firsts, lens, lens, run_of, place)
    joins = ~is_first[1:]
    if (begins[1:] != begins[:-1] + lens[:-1])[joins].any():
        raise ProtocolError("entries of a step with the same batch row are not consecutive positions")
    totals = np.add.reduceat(lens, starts)
    # Every entry of a run except the first is a draft.
    settled = np.maximum(lens[starts], totals - max_logged)
    return _Runs(rows[starts], totals, begins[starts], firsts[starts], settled, lens, run_of, place)


def _no_state(rows: _Ints, begins: _Ints, nexts: _Ints, index: int) -> ProtocolError:
    first, last = (nexts[index, :, place].tolist() for place in (0, 1))
    return ProtocolError(
        f"a step continues batch row {rows[index]} at position {begins[index]}; its states continue at "
        f"{first[0]} to {last[0]} and {first[1]} to {last[1]}"
    )
