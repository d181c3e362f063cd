"""The cost of a step: the agent's times, and the bytes that were fetched from the device."""

from __future__ import annotations

from typing import NamedTuple


class StepCost(NamedTuple):
    """The cost of a step: microseconds for block copies and graph, microseconds for the sampler, bytes fetched from the
    device, and the part of the sampler's microseconds that the draft model took.
    """

    graph_us: int
    sample_us: int = 0
    fetched_bytes: int = 0
    draft_us: int = 0
