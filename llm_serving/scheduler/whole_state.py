"""Saves and restores the state of a whole scheduler: its blocks, its sequences and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_serving.scheduler.running import BlockSupply
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import RequestCodec, Stateful, load_sequence, save_sequence
from llm_serving.scheduler.state import SchedulerState


def all_sequences(state: SchedulerState) -> list[Sequence]:
    """Returns all sequences that have not ended, and the ended sequences whose blocks a step in flight still uses."""
    by_index = {s.arrival_index: s for s in [*state.intake.sequences.values(), *state.running.leaving]}
    return list(by_index.values())


def save_scheduler(
    state: SchedulerState, supply: BlockSupply, parts: Mapping[str, Stateful], codec: RequestCodec
) -> dict[str, Any]:
    """Returns the state of a scheduler as plain data: numbers, texts, bytes, lists and dicts."""
    kv_cache = state.kv_cache
    contents = codec.block_contents(kv_cache.prefix_index) if state.limits.prefix_cache else []
    return {
        "kv_cache": kv_cache.snapshot(contents),
        "sequences": [save_sequence(sequence, codec, supply.version) for sequence in all_sequences(state)],
        "requests": [sequence.arrival_index for sequence in state.intake.sequences.values()],
        "parts": {name: part.snapshot() for name, part in parts.items()},
    }


def restore_scheduler(
    state: SchedulerState,
    supply: BlockSupply,
    parts: Mapping[str, Stateful],
    saved: dict[str, Any],
    codec: RequestCodec,
) -> int:
    """Gives the parts of a new scheduler the state that ``save_scheduler`` returned.

    Returns the number of cached blocks that lookups can no longer find.
    """
    kv_cache = state.kv_cache
    num_lost, version = kv_cache.restore(saved["kv_cache"]), supply.version
    loaded = [load_sequence(each, codec, kv_cache, version) for each in saved["sequences"]]
    sequences = {sequence.arrival_index: sequence for sequence in loaded}
    requests = [sequences[index] for index in saved["requests"]]
    state.intake.sequences = {sequence.request.request_id: sequence for sequence in requests}
    for name, part in parts.items():
        part.restore(saved["parts"][name], sequences)
    return num_lost
