"""Decode steps that verify drafts, which are guesses of the next tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import DecodeBatch, build_decode


def offer_drafts(state: SchedulerState, offers: Iterable[tuple[str, list[int]]]) -> None:
    """Keeps the drafts for the next decode steps of their sequences. ``Scheduler.offer_drafts`` has the rules."""
    state.may_have_drafts = True
    for request_id, token_ids in offers:
        sequence = state.intake.sequences.get(request_id)
        if sequence is not None and sequence.is_decoding and not sequence.num_inflight_drafts:
            sequence.draft = token_ids


def with_drafts(state: SchedulerState, sequences: list[Sequence]) -> list[Sequence]:
    """Returns the sequence of each input token of a decode step: each sequence once, and once more for each draft.

    Only drafts that fit the step and the blocks are included. A draft gets no block that a running sequence may need
    for its next token. No sequence is preempted for a draft.
    """
    limits, running, kv_cache = state.limits, state.running, state.kv_cache
    most_entries = limits.max_decode_entries or limits.decode_batch_size
    num_free = min(most_entries, limits.max_num_batched_tokens) - len(sequences)
    entries: list[Sequence] = []
    for sequence in sequences:
        entries.append(sequence)
        if not sequence.draft or sequence.restarts or sequence.request.num_inflight_tokens:
            continue
        request = sequence.request
        wanted = min(len(sequence.draft), num_free, sequence.max_output_tokens - len(request.output_token_ids) - 1)
        computed = request.num_computed_tokens
        needed = kv_cache.blocks_for(computed + 1 + wanted) - len(sequence.block_table)
        if needed > 0 and needed + len(running) > kv_cache.num_free_blocks:
            wanted = min(wanted, len(sequence.block_table) * kv_cache.block_size - computed - 1)
        if wanted > 0 and kv_cache.grow(sequence.block_table, computed + 1 + wanted):
            entries += [sequence] * wanted
            num_free -= wanted
    return entries


def verify_drafts(state: SchedulerState, sequences: list[Sequence], reason: StepReason) -> ScheduledStep | None:
    """Returns a decode step of the sequences that verifies their drafts, or None if no draft fits."""
    if not any(sequence.draft for sequence in sequences):
        return None
    entries, in_flight = with_drafts(state, sequences), state.in_flight
    if len(entries) == len(sequences):
        return None
    step = build_verification(in_flight.next_seq, reason, DecodeBatch.of(entries))
    return in_flight.add(step, entries, first_chunk=len(entries))


def end_drafts(sequences: list[Sequence]) -> None:
    """Drops the drafts of the sequences of a step that has ended. The step has verified them, or they are void."""
    for sequence in sequences:
        if sequence.draft:
            sequence.draft, sequence.num_inflight_drafts = [], 0


def build_verification(seq: int, reason: StepReason, batch: DecodeBatch) -> ScheduledStep:
    """Builds a decode step that verifies the drafts of its sequences.

    In the columns of ``batch``, each sequence has 1 + k consecutive elements: its last token and its first k drafts.
    All these tokens count as computed. A sequence with a draft must have no step in flight.
    """
    step = build_decode(seq, reason, batch)
    before: Sequence | None = None
    for index, sequence in enumerate(batch.sequences):
        if sequence is before:
            step.token_ids[index] = sequence.draft[sequence.num_inflight_drafts]
            sequence.num_inflight_drafts += 1
            step.sample_positions[index] += sequence.num_inflight_drafts
            step.num_drafts += 1
        before = sequence
    return step
