"""Devices and limits for tests of the simulator: steps of known length, and a host that needs no time."""

from __future__ import annotations

from dataclasses import fields

from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind
from performance.simulation.host import HostModel
from performance.simulation.workload import SimulatedRequest

NO_TIME = HostModel(**{each.name: 0.0 for each in fields(HostModel)})
PREFILL_S, DECODE_S = 2.0, 1.0


class FlatDevice:
    """A device with a fixed time for each kind of step."""

    name = "flat"

    def seconds(self, step: ScheduledStep) -> float:
        return DECODE_S if step.kind is StepKind.DECODE else PREFILL_S


def limits(**changes: object) -> SchedulerLimits:
    values: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 64,
        "max_prompt_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "prefill_batch_size": 4,
        "decode_batch_size": 4,
    }
    return SchedulerLimits(**(values | changes))  # type: ignore[arg-type]


def ask(prompt: int, output: int, ends: int | None = None) -> SimulatedRequest:
    return SimulatedRequest(tuple(range(10, 10 + prompt)), output, ends)
