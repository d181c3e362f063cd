"""The step slots of a group of agents: writes scheduled steps into free slots and reads the results of completed steps.

Keeps the inputs that do not change from one step to the next, so that they are not computed for each step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.errors import AgentLostError, ProtocolError
from llm_serving.executor.step_join import StepJoin
from llm_serving.ipc import messages
from llm_serving.ipc.messages import StepDone, StepFailed
from llm_serving.ipc.shm import MOVE_WIDTH, NO_DRAFT, NO_LOGSUMEXP, STATE_MOVE_WIDTH, SlotLimits, StepSlot
from llm_serving.ipc.tiles import write_shifts, write_tiles
from llm_serving.request import Request
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS, SamplingParams
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult

_SAMPLING_COLUMNS = {each.name: each.column for each in SAMPLER_PARAMETERS} | {
    "num_top_logits": "int32",
    "top_allowed": "int32",
}

_MESSAGES: dict[StepKind, type[messages.Prefill | messages.Decode | messages.Move]] = {
    StepKind.PREFILL: messages.Prefill,
    StepKind.MIXED: messages.Prefill,
    StepKind.DECODE: messages.Decode,
    StepKind.MOVE: messages.Move,
}


@dataclass(slots=True)
class _Batch:
    """The sequences of the last decode step. While the batch stays the same, most columns of a step slot also stay the
    same.
    """

    requests: list[Request]
    rows: list[int]
    row_array: npt.NDArray[np.int32]
    table_lens: list[int]
    """Length of the block table of each sequence in the last step."""
    slots: dict[StepSlot, int]
    """The step slots that already contain the columns that stay the same for this batch. The value is the width of the
    block tables in the slot, or 0 if they are out of date.
    """
    num_masks: int
    """Number of sequences with a constraint."""


class StepSlots:
    """The step slots of one run of a group of agents. ``slots`` is empty while no agents are ready.

    ``ranks`` are the ranks of the agents. A slot is free, or it belongs to a step from ``write`` until ``take`` returns
    the step's result.

    For each batch row, the object keeps the inputs that stay the same from step to step, and copies them into the
    slots. A batch row's sampling parameters and block table are stored when a request begins to use the batch row.
    Later only new blocks are added. A decode step with the sequences of the last decode step writes only what has
    changed: tokens, positions, lengths and longer tables. This is correct because only this class writes the inputs of
    its slots.
    """

    def __init__(
        self,
        limits: SlotLimits,
        block_size: int,
        ranks: range,
        slots: Sequence[StepSlot] = (),
        check_interval: int = 0,
        answering: int = 0,
    ) -> None:
        """``check_interval`` is the number of decode steps between two row checks. 0 turns the check off.

        In a row check, the agents compute one sequence of the step a second time. ``answering`` is the number, in the
        group, of the agent that samples.
        """
        self.free_slots = list(range(len(slots)))
        self.slot_of: dict[int, int] = {}
        """The slot of each step in flight, by the number of the step."""
        self.last_result = 0.0
        """Time at which the last result arrived, or at which the first step after an idle period was sent, by
        ``time.monotonic``.
        """
        self._pause_s = 0.0
        """Seconds since ``last_result`` for which this process was paused."""
        self.join = StepJoin(len(ranks), ranks.start, answering) if len(ranks) > 1 else None
        """Joins the results of several agents. None for a single agent."""
        self._ranks = ranks
        self._slots = slots
        self._limits = limits
        self._block_size = block_size
        num_rows = limits.max_seqs
        self._owners: list[Request | None] = [None] * num_rows
        self._num_blocks = [0] * num_rows
        self._block_tables: npt.NDArray[np.int32] = np.zeros((num_rows, limits.max_blocks_per_seq), np.int32)
        self._sampling: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(num_rows, dtype) for name, dtype in _SAMPLING_COLUMNS.items()
        }
        self._unsent_biases: set[int] = set()
        """Batch rows of sequences whose logit bias the agents do not have yet."""
        self._batch: _Batch | None = None
        self._check_interval = check_interval
        self._num_decodes = 0

    def write(self, step: ScheduledStep) -> messages.Step:
        """Writes a step into a free slot. Returns the message that announces the step to the agents.

        Raises ProtocolError if the step is larger than a slot. In this case, nothing is changed.
        """
        number = self.free_slots[-1]
        self._fill(step, self._slots[number])
        self.free_slots.pop()
        if not self.slot_of:
            self.last_result, self._pause_s = time.monotonic(), 0.0
        self.slot_of[step.seq] = number
        if step.overtakes:
            return messages.Prefill(seq=step.seq, slot=number, overtakes=True)
        return _MESSAGES[step.kind](seq=step.seq, slot=number)

    def write_masks(
        self, seq: int, masks: Sequence[npt.NDArray[np.uint32]]
    ) -> list[messages.Bias | messages.Masks]:
        """Writes the masks of a step in flight. Returns the messages that announce them, in the order to send them.

        Returns no messages if the step has ended. Raises ProtocolError if the number of masks differs from the step's.
        """
        number = self.slot_of.get(seq)
        if number is None:
            return []
        slot, width = self._slots[number], self._limits.mask_words
        if len(masks) != slot.num_masks:
            raise ProtocolError(f"step {seq} has {slot.num_masks} sequences with masks, and {len(masks)} masks")
        for index, mask in enumerate(masks):
            slot.masks[index * width : (index + 1) * width] = mask
        masked = slot.rows[: slot.num_seqs][slot.mask_number[: slot.num_seqs] != 0].tolist()
        biased = tuple(row for row in dict.fromkeys(masked) if self._bias_of(row))
        new = [self._bias_message(seq, row) for row in biased if row in self._unsent_biases]
        self._unsent_biases.difference_update(biased)
        return [*new, messages.Masks(seq=seq, slot=number, biased_rows=biased)]

    def _bias_of(self, row: int) -> tuple[tuple[int, float], ...]:
        owner = self._owners[row]
        return () if owner is None else owner.sampling.logit_bias

    def _bias_message(self, seq: int, row: int) -> messages.Bias:
        ids, values = zip(*self._bias_of(row), strict=True)
        return messages.Bias(
            seq=seq, row=row, token_ids=np.array(ids, np.int32).tobytes(), values=np.array(values, np.float32).tobytes()
        )

    @property
    def waits_since(self) -> float:
        """The time at which the timeout of a step begins: ``last_result`` plus the pauses of this process since then.
        """
        return self.last_result + self._pause_s

    def discount(self, pause_s: float) -> None:
        """Moves the timeout of the running step by ``pause_s``, the seconds for which this process was paused."""
        self._pause_s += pause_s
        if self.join is not None:
            self.join.discount(pause_s)

    def take(self, member: int, reply: StepDone | StepFailed) -> StepResult | None:
        """Processes an agent's reply. ``member`` is its number in the group. Returns the result after the last reply.

        Raises AgentLostError if the step is not in flight in that slot, or the reply contradicts another reply.
        """
        if self.slot_of.get(reply.seq) != reply.slot:
            raise AgentLostError(
                f"agent {self._ranks[member]} answered step {reply.seq} in slot {reply.slot}, which is not in flight"
                " there"
            )
        if self.join is not None:
            joined = self.join.add(member, reply)
            if joined is None:
                return None
            reply = joined
        if isinstance(reply, StepFailed):
            result = StepResult(reply.seq, error=reply.error)
        elif reply.aborted:
            result = StepResult(reply.seq, aborted=True)
        else:
            result = _read_result(self._slots[reply.slot], reply)
        del self.slot_of[reply.seq]
        self.free_slots.append(reply.slot)
        self.last_result, self._pause_s = time.monotonic(), 0.0
        return result

    def _fill(self, step: ScheduledStep, slot: StepSlot) -> None:
        """Writes the inputs of a step. Raises ProtocolError if the step is larger than a slot."""
        num_seqs, num_tokens = step.num_seqs, step.num_tokens
        limits = self._limits
        if num_seqs > limits.max_seqs or num_tokens > limits.max_tokens or len(step.moves) > limits.max_moves:
            raise ProtocolError(
                f"step {step.seq} has {num_seqs} sequences, {num_tokens} tokens and {len(step.moves)} moves; a slot "
                f"holds {limits.max_seqs}, {limits.max_tokens} and {limits.max_moves}"
            )
        if step.moves:
            moves = [(move.kind, move.source, move.destination) for move in step.moves]
            slot.moves[: len(moves) * MOVE_WIDTH].reshape(-1, MOVE_WIDTH)[:] = moves
        if step.state_moves:
            used = len(step.state_moves) * STATE_MOVE_WIDTH
            slot.state_moves[:used].reshape(-1, STATE_MOVE_WIDTH)[:] = step.state_moves
        if step.kind is StepKind.MOVE:
            if limits.hands_over:
                _write_headers(step, slot)
            _write_sizes(step, slot, table_width=0)
        elif step.kind is StepKind.DECODE and not (step.histories or True in step.restarts):
            self._write_decode(step, slot)
        else:
            self._write_any(step, slot)

    def _write_any(self, step: ScheduledStep, slot: StepSlot) -> None:
        """Writes all inputs of a step of any kind. Forgets the last decode batch, so the next decode step writes
        all of its columns again.
        """
        self._batch = None
        num_seqs, num_tokens = step.num_seqs, step.num_tokens
        self._follow_rows(step)
        rows = np.array(step.rows, np.int32)
        starts = np.array(step.starts, np.int32)
        query_lens = np.array(step.query_lens, np.int32)
        context_lens = starts + query_lens
        width = -(-int(context_lens.max()) // self._block_size)
        slot.token_ids[:num_tokens] = step.token_ids
        slot.context_lens[:num_seqs] = context_lens
        slot.sample_position[:num_seqs] = step.sample_positions
        tables = self._block_tables[rows, :width]
        slot.block_tables[: num_seqs * width] = tables.ravel()
        self._write_positions(step, slot, tables, starts, query_lens)
        history_len = self._write_columns(step, slot, rows)
        if self._limits.shifts_positions:
            _write_shifts(step, slot)
        if step.tiles:
            write_tiles(slot.tiles, step.tiles)
        num_masks = len(step.constrained)
        _write_sizes(step, slot, table_width=width, history_len=history_len, num_masks=num_masks)

    def _write_columns(self, step: ScheduledStep, slot: StepSlot, rows: npt.NDArray[np.int32]) -> int:
        """Writes the columns that stay the same in all decode steps of a batch. Also writes the histories.

        A history has the known tokens of a sequence that is new on its batch row. The agent needs them for penalties.
        Returns the total number of tokens in the histories.
        """
        num_seqs = step.num_seqs
        slot.mask_number[:num_seqs] = 0
        constrained = step.constrained
        slot.mask_number[constrained] = range(1, len(constrained) + 1)
        slot.query_lens[:num_seqs] = step.query_lens
        slot.rows[:num_seqs] = rows
        slot.do_sample[:num_seqs] = step.do_sample
        if self._limits.max_adapters:
            slot.adapters[:num_seqs] = [request.adapter_slot for request in step.requests]
        if self._limits.max_draft_ids:
            slot.restarts[:num_seqs] = step.restarts or 0
        for name, column in self._sampling.items():
            slot.arrays[name][:num_seqs] = column[rows]
        return _write_histories(step, slot)

    def _write_decode(self, step: ScheduledStep, slot: StepSlot) -> None:
        """Writes a decode step whose sequences continue on their batch rows: one token for each sequence."""
        batch, num_seqs = self._same_batch(step), step.num_seqs
        if slot not in batch.slots:
            self._write_columns(step, slot, batch.row_array)
            batch.slots[slot] = 0
        positions = np.array(step.starts, np.int32)
        width = max(step.starts) // self._block_size + 1
        slot.token_ids[:num_seqs] = step.token_ids
        slot.positions[:num_seqs] = positions
        np.add(positions, 1, out=slot.context_lens[:num_seqs])
        if self._limits.shifts_positions:
            _write_shifts(step, slot)
        slot.sample_position[:num_seqs] = step.sample_positions
        blocks, offsets = np.divmod(positions, self._block_size)
        slot.slot_mapping[:num_seqs] = self._block_tables[batch.row_array, blocks] * self._block_size + offsets
        if batch.slots[slot] != width:
            slot.block_tables[: num_seqs * width] = self._block_tables[batch.row_array, :width].ravel()
            batch.slots[slot] = width
        checked_row = self._next_checked_row(step)
        _write_sizes(step, slot, table_width=width, checked_row=checked_row, num_masks=batch.num_masks)

    def _next_checked_row(self, step: ScheduledStep) -> int:
        """Returns the number of the sequence, from 1, that the agents compute twice in this decode step. 0 means none.

        If the model has linear attention, steps with drafts are not checked. A draft cannot be computed alone, because
        it needs the state after the tokens before it.
        """
        if step.num_drafts and self._limits.has_states:
            return 0
        self._num_decodes += 1
        if not self._check_interval or self._num_decodes % self._check_interval:
            return 0
        return self._num_decodes // self._check_interval % step.num_seqs + 1

    def _same_batch(self, step: ScheduledStep) -> _Batch:
        """Returns the batch of this decode step.

        If the sequences are those of the last decode step, returns the batch of that step, extended by the new blocks.
        """
        batch = self._batch
        table_lens = list(map(len, step.block_tables))
        if batch is None or batch.requests != step.requests or batch.rows != step.rows:
            self._follow_rows(step)
            row_array, num_masks = np.array(step.rows, np.int32), len(step.constrained)
            batch = _Batch(step.requests, step.rows, row_array, table_lens, {}, num_masks)
            self._batch = batch
        elif batch.table_lens != table_lens:
            self._follow_rows(step)
            batch.table_lens = table_lens
            batch.slots = dict.fromkeys(batch.slots, 0)
        return batch

    def _write_positions(
        self,
        step: ScheduledStep,
        slot: StepSlot,
        tables: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        query_lens: npt.NDArray[np.int32],
    ) -> None:
        num_tokens = step.num_tokens
        seqs = np.arange(step.num_seqs, dtype=np.int32)
        positions = starts
        if num_tokens != step.num_seqs:
            seqs = np.repeat(seqs, query_lens)
            first_token = np.cumsum(query_lens, dtype=np.int32) - query_lens
            positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - first_token, query_lens)
        slot.positions[:num_tokens] = positions
        blocks = tables[seqs, positions // self._block_size]
        slot.slot_mapping[:num_tokens] = blocks * self._block_size + positions % self._block_size

    def _follow_rows(self, step: ScheduledStep) -> None:
        """Stores the sampling parameters of sequences that are new in their batch rows, and the new blocks of all
        sequences.
        """
        restarts = step.restarts or [False] * step.num_seqs
        for request, row, restart, table in zip(step.requests, step.rows, restarts, step.block_tables, strict=True):
            if restart or self._owners[row] is not request:
                self._owners[row] = request
                self._num_blocks[row] = 0
                self._write_sampling(row, request.sampling)
                self._unsent_biases.discard(row)
                if request.sampling.logit_bias:
                    self._unsent_biases.add(row)
            known = self._num_blocks[row]
            if len(table) > known:
                self._block_tables[row, known : len(table)] = table[known:]
                self._num_blocks[row] = len(table)

    def _write_sampling(self, row: int, sampling: SamplingParams) -> None:
        for name in _SAMPLING_COLUMNS:
            wanted = _num_top_logits(sampling) if name == "num_top_logits" else getattr(sampling, name)
            self._sampling[name][row] = wanted


def _write_sizes(
    step: ScheduledStep,
    slot: StepSlot,
    *,
    table_width: int,
    history_len: int = 0,
    checked_row: int = 0,
    num_masks: int = 0,
) -> None:
    slot.write_header(
        step.seq,
        num_tokens=step.num_tokens,
        num_seqs=step.num_seqs,
        table_width=table_width,
        history_len=history_len,
        num_moves=len(step.moves),
        checked_row=checked_row,
        num_masks=num_masks,
        num_drafts=step.num_drafts,
        num_wanted=step.num_wanted,
        num_tiles=len(step.tiles),
        num_state_moves=len(step.state_moves),
    )


def _write_shifts(step: ScheduledStep, slot: StepSlot) -> None:
    end = 0
    for request, start, query_len in zip(step.requests, step.starts, step.query_lens, strict=True):
        begin, end = end, end + query_len
        write_shifts(slot.position_shifts[begin:end], request.tiles, start)


def _write_headers(step: ScheduledStep, slot: StepSlot) -> None:
    """Writes the headers of moves to or from the hand-over pool, and clears the error flags of the moves."""
    headers = np.frombuffer(b"".join(step.headers), np.uint32)
    slot.move_headers[: headers.size] = headers
    slot.move_faults[: len(step.moves)] = 0


def _num_top_logits(sampling: SamplingParams) -> int:
    return sampling.top_logits if sampling.wants_logits else NO_LOGSUMEXP


def _write_histories(step: ScheduledStep, slot: StepSlot) -> int:
    slot.history_lens[: step.num_seqs] = 0
    slot.history_prompt_lens[: step.num_seqs] = 0
    offset = 0
    for history in step.histories:
        end = offset + len(history.token_ids)
        slot.history_lens[history.index] = len(history.token_ids)
        slot.history_prompt_lens[history.index] = history.num_prompt_tokens
        slot.history[offset:end] = history.token_ids
        offset = end
    return offset


def _read_result(slot: StepSlot, done: StepDone) -> StepResult:
    """Copies the results of a completed step out of its slot, which is then free for another step."""
    num_seqs = slot.num_seqs
    if not num_seqs and slot.layout.limits.hands_over:
        bad_moves = np.flatnonzero(slot.move_faults[: slot.num_moves]).tolist()
        return StepResult(done.seq, bad_moves=bad_moves, queue_us=done.queue_us, graph_us=done.graph_us)
    tops = None
    wanted = slot.num_top_logits[:num_seqs]
    if (wanted > 0).any():
        tops = _read_tops(slot, wanted.tolist())
    width = slot.layout.limits.pooled_width
    pooled = slot.pooled[: num_seqs * width].reshape(num_seqs, width) if width else None
    return StepResult(
        done.seq,
        sampled_ids=slot.sampled_ids[:num_seqs].tolist(),
        logits=slot.sampled_logit[:num_seqs].tolist(),
        logsumexps=slot.logsumexp[:num_seqs].tolist(),
        tops=tops,
        pooled=None if pooled is None else [each.tobytes() for each in pooled],
        queue_us=done.queue_us,
        graph_us=done.graph_us,
        sample_us=done.sample_us,
        checked_row=slot.checked_row > 0,
        fetched_bytes=done.fetched_bytes,
        draft_us=done.draft_us,
        device_draws=done.device_draws,
        wrong_draws=done.wrong_draws,
        second_launches=done.second_launches,
        drafts=_read_drafts(slot) if slot.layout.limits.max_draft_ids and slot.num_wanted else None,
    )


def _read_drafts(slot: StepSlot) -> list[list[int]]:
    """Returns the drafts that the draft model has made for each sequence of a step."""
    width = slot.layout.limits.max_draft_ids
    rows: list[list[int]] = slot.draft_ids[: slot.num_seqs * width].reshape(-1, width).tolist()
    return [row[: row.index(NO_DRAFT)] if NO_DRAFT in row else row for row in rows]


def _read_tops(slot: StepSlot, wanted: list[int]) -> list[tuple[tuple[int, float], ...]]:
    shape = (len(wanted), MAX_TOP_LOGITS)
    ids = slot.top_ids[: shape[0] * shape[1]].reshape(shape)
    logits = slot.top_logits[: shape[0] * shape[1]].reshape(shape)
    return [
        tuple(zip(ids[index, :count].tolist(), logits[index, :count].tolist(), strict=True)) if count > 0 else ()
        for index, count in enumerate(wanted)
    ]
