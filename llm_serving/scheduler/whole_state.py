"""Saves and restores the state of a whole scheduler: its blocks, its sequences and its parts.

The flight recorder and its replays use these methods.
"""

from __future__ import annotations

from typing import Any

from llm_serving.block_supply.base import BlockSupply
from llm_serving.scheduler.output import ScheduledStep
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import RequestCodec, Stateful, load_sequence, save_sequence
from llm_serving.scheduler.state import SchedulerState

PARTS = (
    *("state", "preemption", "swapper", "tiers", "hand_overs", "admission", "light_keys", "batching", "composer"),
    *("policy", "quarantine", "states"),
)
"""Names of the scheduler's parts that a snapshot saves. The attribute of a part has the same name with a leading
underscore, for example ``_state``.
"""


class SavedScheduler:
    """The methods of a scheduler that save and restore its state."""

    _state: SchedulerState
    _supply: BlockSupply
    _may_have_suspects: bool

    @property
    def has_ended_updates(self) -> bool:
        """True if ``take_ended`` has updates to return. A snapshot is not possible while this is True."""
        return self._state.intake.has_ended_updates

    def sequences(self) -> list[Sequence]:
        """Returns all sequences that have not ended, and ended sequences whose blocks a step in flight still uses."""
        state = self._state
        by_index = {s.arrival_index: s for s in [*state.intake.sequences.values(), *state.running.leaving]}
        return list(by_index.values())

    def steps_in_flight(self) -> list[ScheduledStep]:
        """Returns the steps in flight, in the order in which they were scheduled."""
        return [flight.step for flight in self._state.in_flight]

    @property
    def _parts(self) -> dict[str, Stateful]:
        """The parts by name. The attribute of an optional feature is None if the feature is off."""
        parts = {name: getattr(self, f"_{name}") for name in PARTS}
        return {name: part for name, part in parts.items() if part is not None}

    def snapshot(self, codec: RequestCodec) -> dict[str, Any]:
        """Returns the whole state as plain data: numbers, texts, bytes, lists and dicts."""
        if self.has_ended_updates:
            raise AssertionError("take_ended must come before a snapshot")
        state, kv_cache = self._state, self._state.kv_cache
        contents = codec.block_contents(kv_cache.prefix_index) if state.limits.prefix_cache else []
        return {
            "kv_cache": kv_cache.snapshot(contents),
            "sequences": [save_sequence(sequence, codec, self._supply.version) for sequence in self.sequences()],
            "requests": [sequence.arrival_index for sequence in state.intake.sequences.values()],
            "parts": {name: part.snapshot() for name, part in self._parts.items()},
        }

    def restore(self, state: dict[str, Any], codec: RequestCodec) -> int:
        """Restores the state that ``snapshot`` returned. The scheduler must be new and have the same limits.

        Returns the number of cached blocks that lookups can no longer find, because their parents are not cached.
        If this number is not 0, later decisions can differ from those of the saved scheduler.
        """
        kv_cache = self._state.kv_cache
        num_lost, version = kv_cache.restore(state["kv_cache"]), self._supply.version
        loaded = [load_sequence(each, codec, kv_cache, version) for each in state["sequences"]]
        sequences = {sequence.arrival_index: sequence for sequence in loaded}
        requests = [sequences[index] for index in state["requests"]]
        self._state.intake.sequences = {sequence.request.request_id: sequence for sequence in requests}
        for name, part in self._parts.items():
            part.restore(state["parts"][name], sequences)
        self._state.may_have_drafts = any(sequence.draft for sequence in loaded)
        self._may_have_suspects = any(sequence.request.is_suspect for sequence in self.sequences())
        return num_lost
