"""The parts of a scheduler, put together as its limits say."""

from __future__ import annotations

from llm_serving.scheduler.admission import Admission, AimdAdmission, NoAdmission, RouterAdmission
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output_length import OutputLengthPredictor
from llm_serving.scheduler.policy import AdmissionKind, Policy
from llm_serving.scheduler.queue_order import PriorityOrder, QueueOrder
from llm_serving.scheduler.slo_order import SloOrder

__all__ = ["make_admission", "make_order"]

_AIMD_FLOOR = 4
_AIMD_CEILING = 4
"""``aimd`` keeps its limit within a quarter and four times of what it starts at."""


def make_order(limits: SchedulerLimits) -> QueueOrder:
    """In which order requests start."""
    if limits.policy is Policy.SLO:
        return SloOrder(limits.ttft_objective, fairness=limits.fairness)
    return PriorityOrder(fairness=limits.fairness)


def make_admission(limits: SchedulerLimits) -> Admission:
    """The admission control."""
    if limits.admission is AdmissionKind.NONE:
        return NoAdmission()
    allocation = limits.max_total_tokens or (limits.num_blocks - 1) * limits.block_size
    predictor = OutputLengthPredictor() if limits.predict_output_length else None
    if limits.admission is AdmissionKind.ROUTER:
        return RouterAdmission(allocation, predictor, block_size=limits.block_size)
    floor, ceiling = max(1, allocation // _AIMD_FLOOR), allocation * _AIMD_CEILING
    return AimdAdmission(allocation, floor, ceiling, predictor, block_size=limits.block_size)
