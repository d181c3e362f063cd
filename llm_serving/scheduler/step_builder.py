"""From sequences to the columns of a step."""

from __future__ import annotations

from llm_serving.ipc.shm import LAST_TOKEN
from llm_serving.request import Request
from llm_serving.scheduler.output import History, ScheduledStep, StepKind
from llm_serving.scheduler.sequence import Sequence

__all__ = ["build_decode", "build_prefill"]


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
        step.block_tables.append(sequence.block_table)
        step.do_sample.append(samples)
        step.sample_positions.append(len(request.output_token_ids))
        if samples and request.sampling.has_penalties:
            tokens = _known_tokens(request, 0, end)
            step.histories.append(History(index, tokens, len(request.prompt_token_ids)))
        request.num_computed_tokens = end
    return step


def build_decode(seq: int, sequences: list[Sequence]) -> ScheduledStep:
    """One token of each sequence: the last one sampled, known here or not. Counts it as computed."""
    requests = [sequence.request for sequence in sequences]
    step = ScheduledStep(
        seq,
        StepKind.DECODE,
        requests=requests,
        rows=[request.row for request in requests],
        token_ids=[LAST_TOKEN if r.num_inflight_tokens else r.output_token_ids[-1] for r in requests],
        query_lens=[1] * len(requests),
        starts=[request.num_computed_tokens for request in requests],
        block_tables=[sequence.block_table for sequence in sequences],
        do_sample=[True] * len(requests),
        sample_positions=[len(r.output_token_ids) + r.num_inflight_tokens for r in requests],
    )
    for request in requests:
        request.num_computed_tokens += 1
    return step


def _known_tokens(request: Request, start: int, end: int) -> list[int]:
    """Tokens ``start .. end - 1`` of prompt and output."""
    num_prompt_tokens = len(request.prompt_token_ids)
    tokens = list(request.prompt_token_ids[start:end])
    if end > num_prompt_tokens:
        tokens += request.output_token_ids[max(start - num_prompt_tokens, 0) : end - num_prompt_tokens]
    return tokens
