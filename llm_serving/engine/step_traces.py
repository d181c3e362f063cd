"""Adds completed steps to the traces of their requests."""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.request import RequestTrace
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.tracing.steps import StepGroup


def trace_step(
    step: ScheduledStep, result: StepResult, updates: Iterable[RequestUpdate], sent: float, now: float
) -> None:
    """Adds a step to the trace of each traced request in it. ``sent`` and ``now`` are times of the engine's clock.

    ``updates`` has the tokens and ends of requests in this result. Adds nothing if the step has failed, and nothing for
    a request that ended before the result arrived.
    """
    if result.error is not None:
        return
    tokens: dict[str, int] = {}
    traces: dict[str, RequestTrace] = {}
    for request, count in zip(step.requests, step.query_lens, strict=True):
        if request.trace is not None:
            tokens[request.request_id] = tokens.get(request.request_id, 0) + count
            if not request.is_finished:
                traces[request.request_id] = request.trace
    if not tokens:
        return
    sampled = {update.request.request_id: update.request for update in updates if update.token_id is not None}
    traces |= {name: request.trace for name, request in sampled.items() if request.trace is not None}
    begun = min(now, sent + result.queue_us / 1e6)
    for name, trace in traces.items():
        group = StepGroup(
            begun, now, frozenset((step.kind.value,)), 1, tokens[name], step.num_seqs, step.num_tokens, now - begun,
            result.queue_us, result.graph_us, result.sample_us,
        )  # fmt: skip
        trace.step(group, has_token=name in sampled)
