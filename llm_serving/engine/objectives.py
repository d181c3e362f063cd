"""Whether a request was served as well as it asked to be: what goodput counts (DistServe, Zhong et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from llm_serving.request import FinishReason, Request, RequestTimings

__all__ = ["met_objectives"]


def met_objectives(request: Request, timings: RequestTimings) -> Mapping[str, bool]:
    """For each objective the request has (``ttft``, ``tbt``) whether it was met, and under ``both`` whether all were.

    The time between tokens is the mean of the request. Empty for a request without objectives, and for one whose client
    left; one that failed or missed its deadline has met none.
    """
    left = request.finish_reason is FinishReason.ABORT and not missed_deadline(request)
    if left or (request.ttft_objective is None and request.tbt_objective is None):
        return {}
    answered = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    met: dict[str, bool] = {}
    if request.ttft_objective is not None:
        met["ttft"] = answered and timings.ttft is not None and timings.ttft <= request.ttft_objective
    if request.tbt_objective is not None:
        met["tbt"] = answered and (timings.tpot is None or timings.tpot <= request.tbt_objective)
    met["both"] = all(met.values())
    return met


def missed_deadline(request: Request) -> bool:
    """Whether it was dropped because its deadline passed before its first token."""
    deadline, end = request.deadline, request.finish_time
    if request.first_token_time is not None or deadline is None or end is None:
        return False
    return request.finish_reason is FinishReason.ABORT and end >= deadline
