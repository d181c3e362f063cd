"""The token ids of a step that are still on the device, because the step before has just sampled them."""

from __future__ import annotations

from dataclasses import dataclass

from agent.scores import DeviceScores
from agent.step_inputs import Int32Array


@dataclass(frozen=True, slots=True)
class InsertedIds:
    """Says which token ids of a step are best tokens of an earlier step. ``agent.run_ahead.cells`` inserts them."""

    earlier: DeviceScores
    """The scores of the earlier step."""
    places: Int32Array
    """[T]: the place of each inserted token among the best tokens, else 0."""
    mask: Int32Array
    """[T]: 1 for each inserted token, else 0."""
