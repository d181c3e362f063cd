"""Checks that no block and no batch row of a scheduler is lost or used twice. For tests and an idle engine."""

from __future__ import annotations

from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState


def check_integrity(state: SchedulerState) -> None:
    """Raises AssertionError unless each block and batch row is either free or held, and all counts agree with the steps
    in flight.
    """
    holders = state.running.holders
    _check_blocks_and_rows(state, holders)
    steps = dict.fromkeys(holders, 0)
    for flight in state.in_flight:
        for sequence in flight.sequences:
            steps[sequence] = steps.get(sequence, 0) + 1
    if steps != {sequence: sequence.num_inflight_steps for sequence in holders}:
        raise AssertionError("a step in flight uses a sequence without blocks, or the counts of steps are wrong")
    unfinished = sum(not sequence.request.is_finished for sequence in holders)
    sequences = state.intake.sequences
    if unfinished + len(state.intake) + len(state.swapped) != len(sequences):
        raise AssertionError(
            f"{len(sequences)} requests: {unfinished} hold blocks, {len(state.intake)} wait,"
            f" {len(state.swapped)} are swapped"
        )
    if state.num_started != sum(s.request.first_scheduled_time is not None for s in sequences.values()):
        raise AssertionError(f"{state.num_started} requests counted as started")


def _check_blocks_and_rows(state: SchedulerState, holders: list[Sequence]) -> None:
    running, kv_cache = state.running, state.kv_cache
    host_tables = [sequence.host_table for sequence in [*holders, *state.swapped]]
    kv_cache.check_integrity([sequence.block_table for sequence in holders], host_tables)
    rows, num_rows = sorted([*running.free_rows, *(s.request.row for s in holders)]), state.limits.max_num_seqs
    if rows != list(range(num_rows)):
        raise AssertionError(f"batch rows held and free are {rows}, not 0 to {num_rows - 1} once each")
    in_order = [sequence.arrival_index for sequence in running]
    if in_order != sorted(in_order):
        raise AssertionError("running sequences are not in order of arrival")
    for sequence in holders:
        held, cached = len(sequence.block_table), sequence.request.num_computed_tokens
        if held < kv_cache.blocks_for(cached):
            raise AssertionError(f"{sequence.request.request_id} holds {held} blocks for {cached} tokens")
