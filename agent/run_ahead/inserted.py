"""Describes which input tokens of a step the host does not have, because the previous step has sampled them on the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.scores import DeviceScores
from agent.step_inputs import Int32Array


@dataclass(frozen=True, slots=True)
class InsertedIds:
    """Describes which input tokens of a step come from the tokens that the device has chosen in the previous step.

    ``DeviceScores.chosen_ids`` has these tokens. ``agent.run_ahead.cells.InsertIds`` inserts them.
    """

    earlier: DeviceScores
    """The scores of the earlier step."""
    places: Int32Array
    """[tokens]: the index of each inserted token among the earlier step's chosen tokens. 0 for all other tokens."""
    mask: Int32Array
    """[tokens]: 1 for each inserted token, else 0."""
