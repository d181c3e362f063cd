"""Finds sequences whose logits are not finite, in the result of a step."""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.scheduler.output import NOT_FINITE_ERROR, RequestUpdate, StepResult


def broken_requests(result: StepResult, updates: Iterable[RequestUpdate]) -> list[str]:
    """Returns the ids of the requests that have ended because their logits in this step are not finite.

    ``updates`` are the scheduler's updates from the result.
    """
    if NOT_FINITE not in result.sampled_ids:
        return []
    return [update.request.request_id for update in updates if update.error == NOT_FINITE_ERROR]


def is_all_broken(result: StepResult) -> bool:
    """Returns True if at least one sequence of the step has logits that are not finite, and the step has no valid
    token.
    """
    return NOT_FINITE in result.sampled_ids and max(result.sampled_ids) < 0
