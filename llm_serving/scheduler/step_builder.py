"""From sequences to the columns of a step."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.ipc.shm import LAST_TOKEN
from llm_serving.request import Request
from llm_serving.scheduler.output import History, ScheduledStep, StepKind
from llm_serving.scheduler.sequence import Sequence

__all__ = ["DecodeBatch", "build_decode", "build_prefill"]


def build_prefill(seq: int, sequences: list[Sequence], query_lens: list[int]) -> ScheduledStep:
    """The next ``query_lens[i]`` known tokens of each sequence, from its first that is not computed.

    Where they reach the last known token, the step samples the next one. Blocks and rows are there already.
    Counts the tokens as computed.
    """
    step = ScheduledStep(seq, StepKind.PREFILL)
    for index, (sequence, query_len) in enumerate(zip(sequences, query_lens, strict=True)):
        request, start = sequence.request, sequence.request.num_computed_tokens
        end = start + query_len
        samples = end == request.num_tokens
        step.requests.append(request)
        step.rows.append(request.row)
        step.token_ids += _known_tokens(request, start, end)
        step.query_lens.append(query_len)
        step.starts.append(start)
        step.restarts.append(start == 0)
        step.block_tables.append(sequence.block_table)
        step.do_sample.append(samples)
        step.sample_positions.append(len(request.output_token_ids))
        if samples and request.sampling.has_penalties:
            tokens = _known_tokens(request, 0, end)
            step.histories.append(History(index, tokens, len(request.prompt_token_ids)))
        request.num_computed_tokens = end
    return step


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
        )


def build_decode(seq: int, batch: DecodeBatch) -> ScheduledStep:
    """One token of each sequence: the last one sampled, known here or not. Counts it as computed."""
    token_ids, starts, sample_positions = [], [], []
    for request in batch.requests:
        output_token_ids, num_inflight_tokens = request.output_token_ids, request.num_inflight_tokens
        token_ids.append(LAST_TOKEN if num_inflight_tokens else output_token_ids[-1])
        starts.append(request.num_computed_tokens)
        sample_positions.append(len(output_token_ids) + num_inflight_tokens)
        request.num_computed_tokens += 1
    return ScheduledStep(
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
    )


def _known_tokens(request: Request, start: int, end: int) -> list[int]:
    """Tokens ``start .. end - 1`` of prompt and output."""
    num_prompt_tokens = len(request.prompt_token_ids)
    tokens = list(request.prompt_token_ids[start:end])
    if end > num_prompt_tokens:
        tokens += request.output_token_ids[max(start - num_prompt_tokens, 0) : end - num_prompt_tokens]
    return tokens
