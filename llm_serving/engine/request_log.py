"""Writes the log lines and metrics of a request: at its first token and at its end, with the time of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_serving.engine.receipts import in_ms
from llm_serving.request import FinishReason, Request, RequestOutput, RequestTimings
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics


class RequestLog:
    """Writes the events of requests to the event log and counts them in the metrics."""

    def __init__(self, log: EventLog, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics

    def first_token(self, request_id: str, seconds: float) -> None:
        """Records that the first output of a streamed request was sent ``seconds`` after the request had arrived."""
        self._log.event("first_token", request_id=request_id, ttft_ms=in_ms(seconds))
        self._metrics.first_token(seconds)

    def request_end(self, output: RequestOutput, timings: RequestTimings, request: Request) -> None:
        """Records the end of ``request``. ``output`` is the last piece of the request."""
        reason, tokens = output.finish_reason, output.num_output_tokens
        if reason is None:
            raise AssertionError(f"{output.request_id} has not ended")
        objectives = met_objectives(request, timings)
        fields: dict[str, Any] = {
            "request_id": output.request_id,
            "prompt_tokens": output.num_prompt_tokens,
            "cached_tokens": timings.num_cached_tokens,
            "output_tokens": tokens,
            "total_tokens": output.num_prompt_tokens + tokens,
            "finish_reason": reason.value,
            "replica": request.replica,
            **{f"{part}_ms": in_ms(seconds) for part, seconds in timings.parts.items()},
            "ttft_ms": None if timings.ttft is None else in_ms(timings.ttft),
            "tpot_ms": None if timings.tpot is None else in_ms(timings.tpot),
            "e2e_ms": in_ms(timings.e2e),
            "preemptions": timings.num_preemptions,
            "swaps": timings.num_swaps,
            "prefill_chunks": timings.num_chunks,
            **_optional_fields(request, timings, objectives),
        }
        if output.error is not None:
            fields["error"] = output.error
        self._log.event("request_end", **fields)
        self._metrics.request_end(output, reason, timings)
        self._metrics.objectives(objectives)
        if request.trace is not None:
            request.trace.end(request, output, timings)


def met_objectives(request: Request, timings: RequestTimings) -> Mapping[str, bool]:
    """Returns for each objective of a request (``ttft``, ``tbt``) whether it was met. ``both`` is True if all were met.

    ``tbt`` is met if the mean time between the request's tokens is within the objective. A request that failed or
    missed its deadline has met no objective. The result is empty if the request has no objectives, or if the client
    closed the connection. Goodput counts the requests for which ``both`` is True (DistServe, Zhong et al. 2024).
    """
    client_left = request.finish_reason is FinishReason.ABORT and not _missed_deadline(request)
    if client_left or (request.ttft_objective is None and request.tbt_objective is None):
        return {}
    is_complete = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    met: dict[str, bool] = {}
    if request.ttft_objective is not None:
        met["ttft"] = is_complete and timings.ttft is not None and timings.ttft <= request.ttft_objective
    if request.tbt_objective is not None:
        met["tbt"] = is_complete and (timings.tpot is None or timings.tpot <= request.tbt_objective)
    met["both"] = all(met.values())
    return met


def _missed_deadline(request: Request) -> bool:
    """Returns True if the request was dropped because its deadline passed before its first token."""
    deadline, end = request.deadline, request.finish_time
    if request.first_token_time is not None or deadline is None or end is None:
        return False
    return request.finish_reason is FinishReason.ABORT and end >= deadline


def _optional_fields(request: Request, timings: RequestTimings, objectives: Mapping[str, bool]) -> dict[str, object]:
    """Returns the fields of a log line that are left out while they have their default values."""
    fields: dict[str, object] = {}
    if timings.blocked:
        fields["blocked_ms"] = {one.reason.value: in_ms(one.seconds) for one in timings.blocked}
        fields["blocked_times"] = {one.reason.value: one.times for one in timings.blocked}
        fields["blocked_by"] = list(timings.blocked_by)
    if request.tenant:
        fields["tenant"] = request.tenant
    if request.priority:
        fields["priority"] = request.priority
    if objectives:
        fields["objectives_met"] = dict(objectives)
    return fields
