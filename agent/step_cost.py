"""The cost of a step: the agent's times, and the bytes that were fetched from the device."""

from __future__ import annotations

from typing import NamedTuple


class StepCost(NamedTuple):
    """The cost of a step: times in microseconds, and bytes.

    The fields are the time for block copies and the graph, the time for the sampler, and the bytes that were fetched
    from the device. ``draft_us`` is the part of the sampler's time that the draft model took. The last three fields are
    described in ``llm_serving.ipc.messages.StepDone``.
    """

    graph_us: int
    sample_us: int = 0
    fetched_bytes: int = 0
    draft_us: int = 0
    device_draws: int = 0
    wrong_draws: int = 0
    second_launches: int = 0
