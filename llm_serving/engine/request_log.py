"""What the event log and the metrics are told of a request: its first token, and at its end where its time went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_serving.engine.objectives import met_objectives
from llm_serving.engine.observer import EngineLog, EngineMetrics
from llm_serving.request import Request, RequestOutput, RequestTimings

__all__ = ["RequestLog"]


class RequestLog:
    """Writes a request's lines into the event log, and tells the metrics."""

    def __init__(self, log: EngineLog, metrics: EngineMetrics) -> None:
        self._log = log
        self._metrics = metrics

    def first_token(self, request_id: str, seconds: float) -> None:
        """A streamed request's first output left ``seconds`` after the request arrived."""
        self._log.event("first_token", request_id=request_id, ttft_ms=_ms(seconds))
        self._metrics.first_token(seconds)

    def request_end(self, output: RequestOutput, timings: RequestTimings, request: Request) -> None:
        """``request`` ended with ``output``."""
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
            **{f"{part}_ms": _ms(seconds) for part, seconds in timings.parts.items()},
            "ttft_ms": None if timings.ttft is None else _ms(timings.ttft),
            "tpot_ms": None if timings.tpot is None else _ms(timings.tpot),
            "e2e_ms": _ms(timings.e2e),
            "preemptions": timings.num_preemptions,
            "swaps": timings.num_swaps,
            "prefill_chunks": timings.num_chunks,
            **_blocked_fields(timings),
            **_terms_fields(request, objectives),
        }
        if output.error is not None:
            fields["error"] = output.error
        self._log.event("request_end", **fields)
        self._metrics.request_end(output, reason, timings)
        self._metrics.objectives(objectives)


def _blocked_fields(timings: RequestTimings) -> dict[str, object]:
    """What stood in the way, if anything did."""
    if not timings.blocked:
        return {}
    return {
        "blocked_ms": {one.reason.value: _ms(one.seconds) for one in timings.blocked},
        "blocked_times": {one.reason.value: one.times for one in timings.blocked},
        "blocked_by": list(timings.blocked_by),
    }


def _terms_fields(request: Request, objectives: Mapping[str, bool]) -> dict[str, object]:
    """What the request asked of the scheduler, where it is not the usual."""
    fields: dict[str, object] = {}
    if request.tenant:
        fields["tenant"] = request.tenant
    if request.priority:
        fields["priority"] = request.priority
    if objectives:
        fields["objectives_met"] = dict(objectives)
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
