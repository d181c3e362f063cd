"""Which prompts, or parts of prompts, a step computes, while it is being put together.

From sequences to the columns of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.ipc.shm import LAST_TOKEN
from llm_serving.request import Request
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import BlockMove, History, MoveKind, ScheduledStep, StepKind, StepReason
from llm_serving.scheduler.sequence import Sequence

__all__ = ["ChunkPlan", "DecodeBatch", "build_decode", "build_mixed", "build_prefill"]


class ChunkPlan:
    """The chunks of one step: the next known tokens of a sequence each, as many as there is room for."""

    def __init__(self, limits: SchedulerLimits, num_tokens: int, num_history_tokens: int = 0) -> None:
        """Room for ``num_tokens``; ``num_history_tokens`` of what a step can carry are taken."""
        self.sequences: list[Sequence] = []
        self.query_lens: list[int] = []
        self.room = num_tokens
        self._max_sequences = limits.prefill_batch_size
        self._history_room = limits.max_step_history - num_history_tokens

    def __bool__(self) -> bool:
        return bool(self.sequences)

    @property
    def is_full(self) -> bool:
        return self.room <= 0 or len(self.sequences) >= self._max_sequences

    def takes(self, sequence: Sequence, num_uncomputed_tokens: int) -> bool:
        """Whether there is room for the next tokens of ``sequence``, of which so many are not computed: a token at
        least, and if they are the last, for the history that the sampler needs with them."""
        if self.is_full:
            return False
        needs_history = num_uncomputed_tokens <= self.room and sequence.request.sampling.has_penalties
        return not needs_history or sequence.request.num_tokens <= self._history_room

    def add(self, sequence: Sequence) -> None:
        """The next tokens of a sequence that the plan ``takes``."""
        uncomputed = sequence.num_uncomputed_tokens
        query_len = min(uncomputed, self.room)
        self.sequences.append(sequence)
        self.query_lens.append(query_len)
        self.room -= query_len
        if query_len == uncomputed and sequence.request.sampling.has_penalties:
            self._history_room -= sequence.request.num_tokens


def build_prefill(seq: int, reason: StepReason, sequences: list[Sequence], query_lens: list[int]) -> ScheduledStep:
    """The next ``query_lens[i]`` known tokens of each sequence, from its first that is not computed.

    Where they reach the last known token, the step samples the next one. Blocks and rows are there already.
    Counts the tokens as computed.
    """
    step = ScheduledStep(seq, StepKind.PREFILL, reason=reason)
    _append_chunks(step, sequences, query_lens)
    return step


def build_mixed(
    seq: int, reason: StepReason, batch: DecodeBatch, sequences: list[Sequence], query_lens: list[int]
) -> ScheduledStep:
    """A row for each sequence that decodes, then chunks as in ``build_prefill``."""
    step = build_decode(seq, reason, batch)
    step.kind = StepKind.MIXED
    # The columns of a batch are shared by its steps; this step's go on.
    step.requests = list(step.requests)
    step.rows = list(step.rows)
    step.query_lens = list(step.query_lens)
    step.block_tables = list(step.block_tables)
    step.do_sample = list(step.do_sample)
    step.restarts = list(step.restarts)
    _append_chunks(step, sequences, query_lens)
    return step


def _append_chunks(step: ScheduledStep, sequences: list[Sequence], query_lens: list[int]) -> None:
    for sequence, query_len in zip(sequences, query_lens, strict=True):
        request, start = sequence.request, sequence.request.num_computed_tokens
        end = start + query_len
        samples = end == request.num_tokens
        if samples and request.sampling.has_penalties:
            step.histories.append(_history(step.num_seqs, request))
        step.requests.append(request)
        step.rows.append(request.row)
        step.token_ids += sequence.known_tokens(start, end)
        step.query_lens.append(query_len)
        step.starts.append(start)
        step.restarts.append(sequence.restarts)
        step.block_tables.append(sequence.block_table)
        step.do_sample.append(samples)
        step.sample_positions.append(len(request.output_token_ids))
        step.moves += [BlockMove(MoveKind.COPY, copy.source, copy.destination) for copy in sequence.copies]
        sequence.restarts = False
        request.num_computed_tokens = end


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The columns that decode steps of the same sequences share, from one change of the batch to the next.

    ``block_tables`` are the sequences' own lists, which grow.
    """

    sequences: list[Sequence]
    requests: list[Request]
    rows: list[int]
    query_lens: list[int]
    block_tables: list[list[int]]
    do_sample: list[bool]
    restarts: list[bool]
    """For the first step of the batch alone, which sets them back."""

    @classmethod
    def of(cls, sequences: list[Sequence]) -> DecodeBatch:
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


def build_decode(seq: int, reason: StepReason, batch: DecodeBatch) -> ScheduledStep:
    """One token of each sequence: the last one sampled, known here or not. Counts it as computed."""
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
        _restart_rows(step, batch)
    return step


def _restart_rows(step: ScheduledStep, batch: DecodeBatch) -> None:
    """Rows that come back from the host: the agent knows nothing of them."""
    step.restarts = list(batch.restarts)
    batch.restarts[:] = [False] * len(batch.restarts)
    for index, (sequence, restarts) in enumerate(zip(batch.sequences, step.restarts, strict=True)):
        if restarts:
            sequence.restarts = False
            if sequence.request.sampling.has_penalties:
                step.histories.append(_history(index, sequence.request))


def _history(index: int, request: Request) -> History:
    return History(index, [*request.prompt_token_ids, *request.output_token_ids], len(request.prompt_token_ids))
