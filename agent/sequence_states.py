"""Keeps the states of sequences for linear attention. Each batch row has states of fixed size in each layer with linear
attention.

In a layer, a batch row has two states. A step reads the state that ends where the step begins, and writes the other
one. So a step can run twice with the same result, which the row check, the replays and the recovery from a failed graph
need. A sequence begins with a state of zeros, so a batch row needs no reset for a new sequence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.step_inputs import Int32Array, StepInputs
from llm_serving.errors import ProtocolError

STATES_PER_ROW = 2
_NONE = -1


class SequenceStates:
    """Decides which state each sequence of a step reads and writes. The operators compute the states.

    A run is all tokens of one batch row in a step. If a step scores the tokens of a prompt, it has several consecutive
    entries with the same batch row. These entries are one run.
    """

    def __init__(self, num_rows: int) -> None:
        """``num_rows`` is the number of batch rows."""
        self.runs: Int32Array = np.zeros((num_rows + 1, 4), np.int32)
        """[num_rows + 1, 4]: a row with the number of runs and three zeros, then a row for each run.

        The row of a run has its first token, its number of tokens, the state to read (-1: zeros) and the state to
        write. Graphs read this memory directly.
        """
        self._ends: npt.NDArray[np.int64] = np.full((num_rows, STATES_PER_ROW), _NONE, np.int64)
        self._is_warm_up = True

    @property
    def num_states(self) -> int:
        return self._ends.size

    def reset(self) -> None:
        """Forgets all states. Before the first call, sequences may begin at any position without a state, because the
        steps of the warm-up do so.
        """
        self._ends[:] = _NONE
        self._is_warm_up = False

    def assign(self, inputs: StepInputs) -> None:
        """Fills ``runs`` for a step. If the same step is assigned again, it gets the same runs.

        A sequence that does not begin at position 0 needs a state of its batch row that ends where its tokens begin.
        Raises ProtocolError if this state does not exist.
        """
        rows, lens, begins, firsts = _runs_of(inputs)
        ends = self._ends[rows]
        found = ends == begins[:, None]
        has_state = found.any(axis=1) & (begins > 0)
        if not (has_state | (begins == 0)).all() and not self._is_warm_up:
            raise _no_state(rows, begins, ends, int(np.argmin(has_state | (begins == 0))))
        read = np.where(has_state, found.argmax(axis=1), _NONE)
        write = np.where(has_state, 1 - read, 0)
        self._ends[rows, 1 - write] = np.where(has_state, begins, _NONE)
        self._ends[rows, write] = begins + lens
        runs = self.runs[1 : 1 + rows.size]
        runs[:, 0], runs[:, 1] = firsts, lens
        runs[:, 2] = np.where(has_state, STATES_PER_ROW * rows + read, _NONE)
        runs[:, 3] = STATES_PER_ROW * rows + write
        self.runs[0, 0] = rows.size


def _runs_of(inputs: StepInputs) -> tuple[npt.NDArray[np.int64], ...]:
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
    return rows[starts], np.add.reduceat(lens, starts), begins[starts], firsts[starts]


def _no_state(
    rows: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], index: int
) -> ProtocolError:
    return ProtocolError(
        f"a step continues batch row {rows[index]} at position {begins[index]}; its states end at "
        f"{ends[index].tolist()}"
    )
