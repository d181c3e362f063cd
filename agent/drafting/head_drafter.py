"""Follows the steps of the model with a head. If a step wants drafts, makes them with the head after this step.

A head needs the hidden states of the model, which exist only until the next step. Therefore the head must compute every
token, even if no drafts are wanted. To save time, the hidden states are copied, and the head computes the tokens of
several steps together. In this module, waiting tokens are tokens that the head has not computed yet.

At position p, a head takes the hidden state at p and the token at p + 1. Therefore ``DraftRows`` stores the sequence's
token at p + 1 at position p. The last hidden state of a chunk waits for the next chunk, which has the next token.

A sequence may start after a cached prefix. The head's key at the last position of the prefix depends on the token after
the prefix. But the hash of a block does not cover this token, so the key may have been computed with another token. A
wrong key makes drafts worse, but no text changes, because the model verifies every draft.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.drafting.drafter import Drafter, Int32Array, Line, is_plain
from agent.drafting.head_network import HeadNetwork
from agent.model_loading import LoadedModel
from agent.step_inputs import StepInputs
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.ipc.drafts import REJECTED
from llm_serving.ipc.shm import StepSlot

logger = logging.getLogger("agent.drafting")

_MAX_WAITING = 64
"""Maximum number of tokens that wait for the head. At this number, the head computes them even if the step wants no
drafts.
"""
_NOBODY = -1


@dataclass(slots=True)
class _Known:
    """Tokens that the model has computed, in the order of their steps. Each array has one entry for each token."""

    rows: Int32Array
    positions: Int32Array
    token_ids: Int32Array
    places: Int32Array
    """The slots of the KV cache to which the tokens' keys and values were written."""
    states: Array
    """The hidden states [tokens, width], as ``HeadNetwork.states_of`` returns them."""
    sampled_rows: Int32Array
    contexts: Int32Array
    sampled_ids: Int32Array
    """For each sampled token: ``sampled_rows`` has its batch row, ``contexts`` its position, and ``sampled_ids`` its
    id.
    """


class HeadDrafter(Drafter):
    """Makes the drafts of an agent with a head. Only the device thread may call it."""

    _network: HeadNetwork

    def __init__(self, config: Config, network: HeadNetwork) -> None:
        """``config`` is the config of the deployment, which must have a head. ``network`` is not loaded yet."""
        super().__init__(config, network)
        rows, cache = config.max_num_seqs, config.pa_config
        self._tables: Int32Array = np.zeros((rows, config.max_blocks_per_seq), np.int32)
        self._contexts: Int32Array = np.zeros(rows, np.int32)
        """[rows]: the number of tokens that the model has computed."""
        self._ends: Int32Array = np.zeros(rows, np.int32)
        """[rows]: the number of positions, from the start of the sequence, for which the following token is known."""
        self._owners: Int32Array = np.full(cache.num_blocks, _NOBODY, np.int32)
        """[blocks]: the batch row whose sequence wrote the block most recently."""
        self._steps: list[_Known] = []
        """The tokens of plain decode steps (without drafts) that are not yet in ``self._rows``."""
        self._waiting: list[tuple[Int32Array, Int32Array, Array]] = []
        """The batch rows, positions and hidden states of the tokens that the head has not computed yet."""
        self._num_waiting = 0

    def load(self, report: Callable[[int, int], None], model: LoadedModel) -> None:
        """Loads and compiles the head, which shares the embedding of ``model``. ``Drafter.load`` describes ``report``
        and the errors.
        """
        self._network.load_head(report, model, self._config)
        self._network.compile()

    def reset(self) -> None:
        """Forgets all sequences."""
        super().reset()
        self._steps.clear()
        self._waiting.clear()
        self._num_waiting = 0
        self._owners.fill(_NOBODY)

    def move_blocks(self, moves: Int32Array) -> None:
        """Copies blocks of the head's KV cache in the same way as the model's blocks. ``moves`` is [copies, 3]."""
        self.settle()
        super().move_blocks(moves)

    @property
    def handed_arrays(self) -> list[Array]:
        """The arrays of the head's KV cache, without the scratch blocks."""
        num_blocks = self._config.pa_config.num_blocks
        return [array[:num_blocks] for array in self._network.model.kv_cache.block_arrays]

    def settle(self) -> None:
        """Computes all waiting tokens, so that the blocks of a prompt are complete before they are handed over."""
        self._take_steps()
        self._compute_waiting()
        super().settle()

    def take_handed(self, blocks: Int32Array) -> None:
        """Records that ``blocks`` are complete, because the head of the other replica has computed the whole prompt.

        If the other head has left out tokens, the drafts are worse.
        """
        self._rows.arrive(blocks, self._config.pa_config.block_size)

    def after_step(self, slot: StepSlot, inputs: StepInputs, tapped: Sequence[Array]) -> int:
        """Stores the tokens and hidden states of a step, and makes drafts like ``Drafter.after_step``."""
        start, seqs = time.perf_counter_ns(), slot.num_seqs
        counts = slot.sampled_ids[:seqs] != REJECTED
        if not self._is_off:
            known = self._known(slot, inputs, counts, self._network.states_of(tapped))
            if is_plain(slot, inputs):
                self._steps.append(known)
            else:
                self._take_steps()
                self._begin(slot, inputs)
                self._take(known)
        if slot.num_wanted:
            self._draft(slot, inputs, counts)
        elif self._num_waiting + len(self._steps) * seqs >= _MAX_WAITING:
            self._take_steps()
            self._compute_waiting()
        return (time.perf_counter_ns() - start) // 1000

    def _known(self, slot: StepSlot, inputs: StepInputs, counts: npt.NDArray[np.bool_], states: Array) -> _Known:
        """Returns copies of the step's tokens and hidden states, without rejected drafts.

        ``counts`` has a flag for each index of the step's arrays. The flag is False for a rejected draft, else True.
        """
        sampled, contexts = slot.sampled_ids[: slot.num_seqs], inputs.context_lens
        used, has_token = np.repeat(counts, inputs.query_lens), sampled >= 0
        return _Known(
            np.repeat(inputs.rows, inputs.query_lens)[used],
            inputs.positions[used],
            inputs.token_ids[used],
            inputs.slot_mapping[used],
            states if used.all() else states[used],
            inputs.rows[has_token],
            contexts[has_token],
            sampled[has_token],
        )

    def _begin(self, slot: StepSlot, inputs: StepInputs) -> None:
        """Starts the new sequences of a step on their batch rows."""
        restarts = np.flatnonzero(slot.restarts[: slot.num_seqs]).tolist()
        if restarts:
            self._compute_waiting()  # the rows and blocks of ended sequences may be in use again
        for index in restarts:
            start = int(inputs.context_lens[index] - inputs.query_lens[index])
            self._rows.begin(int(inputs.rows[index]), start, inputs.block_tables[index])
        self._tables[inputs.rows, : inputs.block_tables.shape[1]] = inputs.block_tables

    def _take_steps(self) -> None:
        """Stores the tokens of the plain decode steps that were kept in ``self._steps``."""
        steps, self._steps = self._steps, []
        for known in steps:
            self._take(known)

    def _take(self, known: _Known) -> None:
        """Stores tokens by batch row, and keeps their hidden states until the head computes them."""
        rows, positions = known.rows, known.positions
        shifted = positions > 0
        self._rows.tokens[rows[shifted], positions[shifted] - 1] = known.token_ids[shifted]
        self._contexts[rows], self._ends[rows] = positions + 1, positions
        self._rows.tokens[known.sampled_rows, known.contexts - 1] = known.sampled_ids
        self._ends[known.sampled_rows] = known.contexts
        size = self._config.pa_config.block_size
        blocks = known.places // size
        self._owners[blocks] = rows
        self._tables[rows, positions // size] = blocks
        self._rows.note_blocks(rows, positions, blocks)
        follows = self._rows.num_computed[rows] >= 0
        if follows.any():
            self._wait(rows[follows], positions[follows], known.states[follows])

    def _wait(self, rows: Int32Array, positions: Int32Array, states: Array) -> None:
        self._waiting.append((rows, positions, states))
        self._num_waiting += rows.size

    def _compute_waiting(self) -> None:
        """Lets the head compute all waiting tokens, without making drafts."""
        if self._waiting and not self._is_off:
            self._guarded(lambda: self._catch_up([]))

    def _lines(self, slot: StepSlot, inputs: StepInputs, counts: npt.NDArray[np.bool_]) -> list[Line]:
        """Returns a ``Line`` for each sequence of the step that may get drafts.

        ``counts`` has a flag for each index of the step's arrays. The flag is False for a rejected draft, else True.
        """
        lines: dict[int, Line] = {}
        for index in np.flatnonzero(counts).tolist():
            row, context = int(inputs.rows[index]), int(inputs.context_lens[index])
            lines.pop(row, None)
            samples = slot.sampled_ids[index] >= 0
            if samples and self._rows.num_computed[row] >= 0 and context < self._longest:
                lines[row] = self._line(row, index)
        return list(lines.values())

    def _line(self, row: int, index: int) -> Line:
        """Returns what the head needs to continue the sequence on batch row ``row``.

        ``index`` is the index of the sequence in the step's arrays. A negative index means that the sequence gets no
        drafts.
        """
        table, num_own = self._table(row, int(self._contexts[row]), self._tables[row])
        start, end = int(self._rows.num_computed[row]), int(self._ends[row])
        return Line(index, row, start, end, num_own, index >= 0, table)

    def _catch_up(self, lines: list[Line]) -> None:
        """Runs the head on all waiting tokens. This also makes the first draft of each of ``lines``."""
        wanted = {line.row: line for line in lines}
        waiting = [
            (line, states)
            for row, positions, states in self._sorted_waiting()
            if (line := self._continued(row, positions, states, wanted)) is not None
        ]
        while waiting:
            left, chunks = self._network.config.max_num_batched_tokens, []
            for line, states in waiting:
                if left == 0:
                    break
                chunks.append((line, states[: min(line.end - line.start, left)]))
                left -= len(chunks[-1][1])
            best_ids, own = self._run_states([(line, line.start, states) for line, states in chunks], own=False)
            for number, (line, states) in enumerate(chunks):
                begin, line.start = line.start, line.start + len(states)
                self._rows.computed(line.row, begin, line.start, line.table)
                if line.start == line.end and line.samples:
                    line.drafts.append(int(best_ids[number]))
                    line.state = own[number : number + 1]
            done = {line.row: len(states) for line, states in chunks}
            waiting = [(line, states[done.get(line.row, 0) :]) for line, states in waiting if line.start < line.end]

    def _sorted_waiting(self) -> list[tuple[int, Int32Array, Array]]:
        """Removes all waiting tokens and returns them as (batch row, positions, hidden states) for each sequence.

        If another sequence has written to a block of a waiting token, the token's sequence has ended. The result then
        leaves out all tokens of this sequence.
        """
        if not self._waiting:
            return []
        rows, positions, states = map(np.concatenate, zip(*self._waiting, strict=True))
        self._waiting.clear()
        self._num_waiting = 0
        blocks = self._tables[rows, positions // self._config.pa_config.block_size]
        gone = np.unique(rows[self._owners[blocks] != rows])
        self._rows.num_computed[gone] = -1
        order = np.lexsort((positions, rows))
        order = order[~np.isin(rows[order], gone)]
        rows, positions, states = rows[order], positions[order], states[order]
        bounds = np.flatnonzero(np.diff(rows)) + 1
        parts = zip(np.split(rows, bounds), np.split(positions, bounds), np.split(states, bounds), strict=True)
        return [(int(own[0]), places, own_states) for own, places, own_states in parts if own.size]

    def _continued(self, row: int, positions: Int32Array, states: Array, wanted: dict[int, Line]) -> Line | None:
        """Returns the ``Line`` of a sequence if the head can compute some of its waiting tokens, else None.

        ``wanted`` has the lines of the sequences that get drafts, by batch row. If the token after a waiting token is
        not known yet, the waiting token stays waiting. If a hidden state is missing, the sequence gets no drafts.
        """
        line = wanted.get(row) or self._line(row, -1)
        if line.start < 0 or positions[0] != line.start or positions[-1] - positions[0] != positions.size - 1:
            self._rows.num_computed[row] = -1
            return None
        line.end = min(line.end, line.start + positions.size)
        ready = line.end - line.start
        if ready < positions.size:
            self._wait(np.full(positions.size - ready, row, np.int32), positions[ready:], states[ready:])
        return line if ready > 0 else None

    def _continue(self, lines: list[Line], num_wanted: int) -> None:
        """Extends the drafts of each sequence in ``lines`` from one draft to ``num_wanted``. Each further draft takes
        one pass of the head.

        These passes take the head's own hidden states. If the model confirms a draft, the head later computes the key
        and value of this draft again, with the hidden state of the model.
        """
        for number in range(num_wanted - 1):
            lines = [line for line in lines if line.end + number < self._longest]
            if not lines:
                return
            for line in lines:
                self._rows.tokens[line.row, line.end + number] = line.drafts[-1]
            best_ids, own = self._run_states([(line, line.end + number, line.state) for line in lines], own=True)
            for place, line in enumerate(lines):
                line.drafts.append(int(best_ids[place]))
                line.state = own[place : place + 1]

    def _run_states(self, chunks: list[tuple[Line, int, Array]], *, own: bool) -> tuple[Int32Array, Array]:
        """Runs one pass of the head. Returns the best next token and the new hidden state for each chunk.

        A chunk is (line, first position, hidden states): tokens of one sequence that the pass computes.
        """
        tokens = [self._rows.tokens[line.row, start : start + len(states)] for line, start, states in chunks]
        counts = np.array([len(states) for _, _, states in chunks], np.int32)
        starts = np.array([start for _, start, _ in chunks], np.int32)
        tables = np.stack([line.table for line, _, _ in chunks])
        states = np.concatenate([states for _, _, states in chunks])
        return self._network.run_states(np.concatenate(tokens), counts, starts, tables, states, own=own)
