"""Writes a scheduled step into a slot and reads its results out. Nothing per token that can be per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.errors import ProtocolError
from llm_serving.ipc import messages
from llm_serving.ipc.shm import MOVE_WIDTH, NO_LOGSUMEXP, SlotLimits, StepSlot
from llm_serving.request import MAX_TOP_LOGITS, Request, SamplingParams
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult

_SAMPLING_COLUMNS = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "repetition_penalty": "float32",
    "presence_penalty": "float32",
    "frequency_penalty": "float32",
    "seed": "uint64",
    "num_top_logits": "int32",
}


_MESSAGES: dict[StepKind, type[messages.Prefill | messages.Decode | messages.Move]] = {
    StepKind.PREFILL: messages.Prefill,
    StepKind.MIXED: messages.Prefill,
    StepKind.DECODE: messages.Decode,
    StepKind.MOVE: messages.Move,
}


def announcement(step: ScheduledStep, slot: int) -> messages.Step:
    """The message that tells the agent of a step written into slot number ``slot``."""
    return _MESSAGES[step.kind](seq=step.seq, slot=slot)


@dataclass(slots=True)
class _Batch:
    """The sequences of the last decode step: while they stay the same, most of a slot does, too."""

    requests: list[Request]
    rows: list[int]
    row_array: npt.NDArray[np.int32]
    table_lens: list[int]
    """Blocks of each sequence's table that ``SlotWriter`` has taken over."""
    slots: dict[StepSlot, int]
    """Slots that hold this batch's constant columns, and for which width its block tables (0: not these tables)."""


class SlotWriter:
    """Keeps what does not change from step to step, one table row an agent row, and gathers a step's rows from it.

    A row's block table and sampling parameters are written when a request (re)starts the row; after that only the
    table's new blocks are. A decode step of the same sequences as the last one only writes what moved on: tokens,
    positions, lengths and grown tables. It relies on slots that nobody else writes inputs to.
    """

    def __init__(self, limits: SlotLimits, block_size: int, num_rows: int) -> None:
        self._limits = limits
        self._block_size = block_size
        self._owners: list[Request | None] = [None] * num_rows
        self._num_blocks = [0] * num_rows
        self._block_tables: npt.NDArray[np.int32] = np.zeros((num_rows, limits.max_blocks_per_seq), np.int32)
        self._sampling: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(num_rows, dtype) for name, dtype in _SAMPLING_COLUMNS.items()
        }
        self._batch: _Batch | None = None

    def write(self, step: ScheduledStep, slot: StepSlot) -> None:
        """Fill the slot's inputs. Raises ProtocolError when the step is larger than a slot."""
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
        if step.kind is StepKind.MOVE:
            _write_sizes(step, slot, table_width=0)
        elif step.kind is StepKind.DECODE and not (step.histories or True in step.restarts):
            self._write_decode(step, slot)
        else:
            self._write_any(step, slot)

    def _write_any(self, step: ScheduledStep, slot: StepSlot) -> None:
        """A step of any shape; what was known of the batch and of the slot is void."""
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
        _write_sizes(step, slot, table_width=width, history_len=history_len)

    def _write_columns(self, step: ScheduledStep, slot: StepSlot, rows: npt.NDArray[np.int32]) -> int:
        """What a decode step has in common with the next of the same sequences. The length of the histories."""
        num_seqs = step.num_seqs
        slot.query_lens[:num_seqs] = step.query_lens
        slot.rows[:num_seqs] = rows
        slot.do_sample[:num_seqs] = step.do_sample
        for name, column in self._sampling.items():
            getattr(slot, name)[:num_seqs] = column[rows]
        return _write_histories(step, slot)

    def _write_decode(self, step: ScheduledStep, slot: StepSlot) -> None:
        """One token a sequence, of rows that go on."""
        batch, num_seqs = self._same_batch(step), step.num_seqs
        if slot not in batch.slots:
            self._write_columns(step, slot, batch.row_array)
            batch.slots[slot] = 0
        positions = np.array(step.starts, np.int32)
        width = max(step.starts) // self._block_size + 1
        slot.token_ids[:num_seqs] = step.token_ids
        slot.positions[:num_seqs] = positions
        np.add(positions, 1, out=slot.context_lens[:num_seqs])
        slot.sample_position[:num_seqs] = step.sample_positions
        blocks, offsets = np.divmod(positions, self._block_size)
        slot.slot_mapping[:num_seqs] = self._block_tables[batch.row_array, blocks] * self._block_size + offsets
        if batch.slots[slot] != width:
            slot.block_tables[: num_seqs * width] = self._block_tables[batch.row_array, :width].ravel()
            batch.slots[slot] = width
        _write_sizes(step, slot, table_width=width)

    def _same_batch(self, step: ScheduledStep) -> _Batch:
        """The batch of the last decode step if it is this step's, with its tables followed; else a new one."""
        batch = self._batch
        table_lens = list(map(len, step.block_tables))
        if batch is None or batch.requests != step.requests or batch.rows != step.rows:
            self._follow_rows(step)
            batch = _Batch(step.requests, step.rows, np.array(step.rows, np.int32), table_lens, {})
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
        restarts = step.restarts or [False] * step.num_seqs
        for request, row, restart, table in zip(step.requests, step.rows, restarts, step.block_tables, strict=True):
            if restart or self._owners[row] is not request:
                self._owners[row] = request
                self._num_blocks[row] = 0
                self._write_sampling(row, request.sampling)
            known = self._num_blocks[row]
            if len(table) > known:
                self._block_tables[row, known : len(table)] = table[known:]
                self._num_blocks[row] = len(table)

    def _write_sampling(self, row: int, sampling: SamplingParams) -> None:
        for name in _SAMPLING_COLUMNS:
            wanted = _num_top_logits(sampling) if name == "num_top_logits" else getattr(sampling, name)
            self._sampling[name][row] = wanted


def _write_sizes(step: ScheduledStep, slot: StepSlot, *, table_width: int, history_len: int = 0) -> None:
    slot.write_header(
        step.seq,
        num_tokens=step.num_tokens,
        num_seqs=step.num_seqs,
        table_width=table_width,
        history_len=history_len,
        num_moves=len(step.moves),
    )


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


def read_result(slot: StepSlot, seq: int, times_us: tuple[int, int, int]) -> StepResult:
    """Copy a finished step's outputs out of its slot; after this the slot may be written again."""
    num_seqs = slot.num_seqs
    tops = None
    wanted = slot.num_top_logits[:num_seqs]
    if (wanted > 0).any():
        tops = _read_tops(slot, wanted.tolist())
    return StepResult(
        seq,
        sampled_ids=slot.sampled_ids[:num_seqs].tolist(),
        logits=slot.sampled_logit[:num_seqs].tolist(),
        logsumexps=slot.logsumexp[:num_seqs].tolist(),
        tops=tops,
        queue_us=times_us[0],
        graph_us=times_us[1],
        sample_us=times_us[2],
    )


def _read_tops(slot: StepSlot, wanted: list[int]) -> list[tuple[tuple[int, float], ...]]:
    shape = (len(wanted), MAX_TOP_LOGITS)
    ids = slot.top_ids[: shape[0] * shape[1]].reshape(shape)
    logits = slot.top_logits[: shape[0] * shape[1]].reshape(shape)
    return [
        tuple(zip(ids[index, :count].tolist(), logits[index, :count].tolist(), strict=True)) if count > 0 else ()
        for index, count in enumerate(wanted)
    ]
