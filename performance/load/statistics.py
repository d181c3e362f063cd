"""Calculates the figures of a load test, which ``llm_serving.telemetry.statistics`` defines.

- A piece is a streamed event with output. The first piece stands for the first token, the last piece for the last
token.
- Latencies count from the time at which the request's first byte was written, as in the server's log.
- If the client sends a request after its due time, the results must show this delay ("coordinated omission").
  ``lateness_ms`` is the delay. ``ttft_from_due_ms`` and ``e2e_from_due_s`` count from the due time and include it.
- Latencies include only requests that succeeded. Throughput includes all tokens that arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llm_serving.telemetry.statistics import Distribution, Summary, normalized_latency, summarize, time_per_output_token
from performance.load.client import LoadRun
from performance.load.options import LoadOptions
from performance.load.stream import RequestRecord

BUSY_CPU_PERCENT = 70.0
"""If the client uses more than this percentage of a core, its figures are doubtful."""
LATE_MS = 50.0
"""If the 99th percentile of the lateness exceeds this limit, the report warns that the client was too slow."""
LATENCIES = {
    "ttft_ms": "time to first token (ms)",
    "tbt_ms": "time between tokens (ms)",
    "tpot_ms": "time per output token (ms)",
    "e2e_s": "end to end (s)",
    "normalized_latency_ms": "normalized (ms/token)",
    "ttft_from_due_ms": None,
    "e2e_from_due_s": None,
}
"""Latencies by name, with their titles in the printed table. A latency without a title is only in the JSON file.

To add a latency, declare its name here, in ``RequestFigures`` and in ``LoadFigures``.
"""
LATE_FRACTION = 0.1
"""If the mean lateness exceeds this fraction of the mean TTFT, the report contains a warning."""


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """The latencies of a request. Every latency is None if the request failed."""

    record: RequestRecord
    lateness_ms: float
    ttft_ms: float | None = None
    ttft_from_due_ms: float | None = None
    tpot_ms: float | None = None
    max_tbt_ms: float | None = None
    e2e_s: float | None = None
    e2e_from_due_s: float | None = None
    normalized_latency_ms: float | None = None
    is_good: bool = False
    """True if the request succeeded and met the objectives."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Counts, rates and latencies of all requests of a run."""

    requests: int
    failures: dict[str, int]
    total_time_s: float
    qps: float
    """Successful requests per second of total time."""
    prompt_tokens: int | None
    """Number of prompt tokens, or None if the server did not report it."""
    output_tokens: int
    output_tokens_per_s: float
    tokens_are_counted_pieces: bool
    """True if the server did not report the number of tokens, so that ``output_tokens`` is the number of pieces."""
    good_requests: int
    client_cpu_percent: float
    lateness_ms: Summary
    per_request: list[RequestFigures]
    ttft_ms: Summary
    tbt_ms: Summary
    tpot_ms: Summary
    e2e_s: Summary
    normalized_latency_ms: Summary
    ttft_from_due_ms: Summary
    e2e_from_due_s: Summary

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def completed(self) -> int:
        return self.requests - self.failed

    @property
    def goodput_fraction(self) -> float:
        return _ratio(self.good_requests, self.requests)

    @property
    def goodput_per_s(self) -> float:
        return _ratio(self.good_requests, self.total_time_s)

    @property
    def client_was_bottleneck(self) -> bool:
        return self.client_cpu_percent > BUSY_CPU_PERCENT or (self.lateness_ms.p99 or 0.0) > LATE_MS

    @property
    def sends_were_late(self) -> bool:
        """True if the mean lateness is large compared with the mean TTFT.

        The lateness of a request is the time from its due time to its write. Latencies do not include it.
        """
        return (self.lateness_ms.mean or 0.0) > LATE_FRACTION * (self.ttft_ms.mean or float("inf"))


def measure(run: LoadRun) -> LoadFigures:
    """Calculates counts, rates and latencies of ``run``."""
    per_request = [_request_figures(record, run.options) for record in run.records]
    gaps = Distribution()
    for record in run.records:
        if record.ok:
            gaps.extend([(later - earlier) * 1000.0 for earlier, later in pairwise(record.piece_times)])
    prompt_tokens = [record.prompt_tokens for record in run.records if record.prompt_tokens is not None]
    output_tokens = sum(record.output_tokens for record in run.records)
    return LoadFigures(
        requests=len(run.records),
        failures=dict(Counter(record.failure for record in run.records if record.failure is not None).most_common()),
        total_time_s=run.total_time_s,
        qps=_ratio(sum(record.ok for record in run.records), run.total_time_s),
        prompt_tokens=sum(prompt_tokens) if prompt_tokens else None,
        output_tokens=output_tokens,
        output_tokens_per_s=_ratio(output_tokens, run.total_time_s),
        tokens_are_counted_pieces=any(record.ok and not record.tokens_known for record in run.records),
        good_requests=sum(figures.is_good for figures in per_request),
        client_cpu_percent=100.0 * _ratio(run.client_cpu_s, run.total_time_s),
        lateness_ms=_summary(per_request, "lateness_ms"),
        per_request=per_request,
        tbt_ms=gaps.summary(),
        **{name: _summary(per_request, name) for name in LATENCIES if name != "tbt_ms"},
    )


def _request_figures(record: RequestRecord, options: LoadOptions) -> RequestFigures:
    lateness_ms = (record.sent - record.due) * 1000.0
    if not record.ok or record.end is None:
        return RequestFigures(record, lateness_ms)
    times = record.piece_times
    ttft_ms = (times[0] - record.sent) * 1000.0
    tpot_s = time_per_output_token(times[0], times[-1], record.output_tokens)
    tpot_ms = None if tpot_s is None else tpot_s * 1000.0
    max_tbt_ms = max((later - earlier for earlier, later in pairwise(times)), default=0.0) * 1000.0
    e2e_s = record.end - record.sent
    normalized_s = normalized_latency(e2e_s, record.output_tokens)
    is_good = (
        ttft_ms <= options.slo_ttft_ms
        and (tpot_ms is None or tpot_ms <= options.slo_tpot_ms)
        and (options.slo_tbt_ms is None or max_tbt_ms <= options.slo_tbt_ms)
    )
    return RequestFigures(
        record,
        lateness_ms,
        ttft_ms=ttft_ms,
        ttft_from_due_ms=ttft_ms + lateness_ms,
        tpot_ms=tpot_ms,
        max_tbt_ms=max_tbt_ms,
        e2e_s=e2e_s,
        e2e_from_due_s=record.end - record.due,
        normalized_latency_ms=None if normalized_s is None else normalized_s * 1000.0,
        is_good=is_good,
    )


def _summary(per_request: Sequence[RequestFigures], name: str) -> Summary:
    return summarize(value for figures in per_request if (value := getattr(figures, name)) is not None)


def _ratio(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
