"""Builds the columns of a step: lists with one entry for each of its sequences or tokens."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.ipc.shm import LAST_TOKEN, MoveKind
from llm_serving.ipc.tiles import tiles_between
from llm_serving.request import Request
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import BlockMove, History, ScheduledStep, StepKind, StepReason
from llm_serving.scheduler.returning import restart_rows
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.tile_budget import tokens_before_tiles


class ChunkPlan:
    """The prompt chunks of a step that the scheduler is composing.

    A chunk consists of the next known tokens of a sequence that are not computed.
    """

    def __init__(self, limits: SchedulerLimits, num_tokens: int, num_history_tokens: int = 0) -> None:
        """Creates an empty plan. ``num_tokens``: maximum number of prompt tokens in the step.

        ``num_history_tokens``: total length of the token histories that the step's decoding sequences send to the
        sampler, for penalties.
        """
        self.sequences: list[Sequence] = []
        self.query_lens: list[int] = []
        self.num_free_tokens = num_tokens
        self._max_sequences = limits.prefill_batch_size
        self._num_free_history = limits.max_step_history - num_history_tokens

    def __bool__(self) -> bool:
        return bool(self.sequences)

    @property
    def is_full(self) -> bool:
        return self.num_free_tokens <= 0 or len(self.sequences) >= self._max_sequences

    def fits(self, sequence: Sequence, num_uncomputed_tokens: int) -> bool:
        """Returns True if the step has space for at least one token of ``sequence``.

        ``num_uncomputed_tokens`` is the number of its known tokens that must be computed. If the step can compute them
        all, it also samples the next token. The history of a sequence with penalties must then fit the step, too.
        """
        if self.is_full:
            return False
        if sequence.request.tiles and not self._chunk_with_tiles(sequence, num_uncomputed_tokens)[0]:
            return False
        needs_history = num_uncomputed_tokens <= self.num_free_tokens and sequence.request.sampling.has_penalties
        return not needs_history or sequence.request.num_tokens <= self._num_free_history

    def add(self, sequence: Sequence) -> None:
        """Adds the next chunk of a sequence for which ``fits`` is True."""
        uncomputed = sequence.num_uncomputed_tokens
        query_len, cost = min(uncomputed, self.num_free_tokens), 0
        if sequence.request.tiles:
            query_len, cost = self._chunk_with_tiles(sequence, uncomputed)
        self.sequences.append(sequence)
        self.query_lens.append(query_len)
        self.num_free_tokens -= query_len + cost
        if query_len == uncomputed and sequence.request.sampling.has_penalties:
            self._num_free_history -= sequence.request.num_tokens

    def _chunk_with_tiles(self, sequence: Sequence, num_uncomputed_tokens: int) -> tuple[int, int]:
        request, is_first = sequence.request, not self.sequences
        return tokens_before_tiles(request, num_uncomputed_tokens, self.num_free_tokens, is_first=is_first)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The columns (lists with one entry per sequence) that consecutive decode steps of the same sequences share.

    ``block_tables`` has the sequences' own lists, not copies. So the column is still valid when a block table grows.
    """

    sequences: list[Sequence]
    requests: list[Request]
    rows: list[int]
    query_lens: list[int]
    block_tables: list[list[int]]
    do_sample: list[bool]
    restarts: list[bool]
    """True for a sequence in its first step on its batch row. The first step of the batch resets the list to False."""

    @classmethod
    def of(cls, sequences: list[Sequence]) -> DecodeBatch:
        """Creates the columns for a new batch of sequences."""
        requests = [sequence.request for sequence in sequences]
        return cls(
            sequences,
            requests,
            rows=[request.row for request in requests],
            query_lens=[1] * len(requests),
            block_tables=[sequence.block_table for sequence in sequences],
            do_sample=[True] * len(requests),
            restarts=[sequence.restarts for sequence in sequences],
        )


def build_prefill(seq: int, reason: StepReason, plan: ChunkPlan) -> ScheduledStep:
    """Builds the prefill step of a plan, and adds its tokens to the sequences' ``num_computed_tokens``.

    If a chunk ends with the last known token of a sequence, the step samples the next token. All sequences must have
    batch rows and blocks.
    """
    step = ScheduledStep(seq, StepKind.PREFILL, reason=reason)
    append_chunks(step, plan)
    return step


def build_decode(seq: int, reason: StepReason, batch: DecodeBatch) -> ScheduledStep:
    """Builds a decode step. Its input is the last token of each sequence, which then counts as computed."""
    token_ids, starts, sample_positions = [], [], []
    for request in batch.requests:
        output_token_ids, num_inflight_tokens = request.output_token_ids, request.num_inflight_tokens
        token_ids.append(LAST_TOKEN if num_inflight_tokens else output_token_ids[-1])
        starts.append(request.num_computed_tokens)
        sample_positions.append(len(output_token_ids) + num_inflight_tokens)
        request.num_computed_tokens += 1
    step = ScheduledStep(
        seq,
        StepKind.DECODE,
        requests=batch.requests,
        rows=batch.rows,
        token_ids=token_ids,
        query_lens=batch.query_lens,
        starts=starts,
        block_tables=batch.block_tables,
        do_sample=batch.do_sample,
        sample_positions=sample_positions,
        restarts=batch.restarts,
        reason=reason,
    )
    if True in batch.restarts:
        restart_rows(step, batch.sequences, batch.restarts)
    return step


def append_chunks(step: ScheduledStep, plan: ChunkPlan) -> None:
    """Appends the prompt chunks of a plan to a step, and adds their tokens to the sequences' ``num_computed_tokens``.
    """
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        request, start = sequence.request, sequence.request.num_computed_tokens
        end = start + query_len
        samples = end == request.num_tokens
        if samples and request.sampling.has_penalties:
            step.histories.append(History.of(step.num_seqs, request))
        step.requests.append(request)
        step.rows.append(request.row)
        step.token_ids += sequence.known_tokens(start, end)
        step.query_lens.append(query_len)
        step.starts.append(start)
        step.restarts.append(sequence.restarts)
        step.block_tables.append(sequence.block_table)
        step.do_sample.append(samples)
        step.sample_positions.append(len(request.output_token_ids))
        if request.tiles:
            step.tiles += tiles_between(request.tiles, start, end, step.num_tokens - query_len)
        step.moves += [BlockMove(MoveKind.COPY, copy.source, copy.destination) for copy in sequence.copies]
        sequence.restarts = False
        request.num_computed_tokens = end
