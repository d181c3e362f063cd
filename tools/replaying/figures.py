"""Summarises a part of a flight recording in a few numbers: requests, steps, latencies, preemptions.

The part is a ``Stretch``: consecutive segments of one run without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llm_serving.flight.format import STATE_NAMES
from llm_serving.flight.history import Arrival, arrivals
from llm_serving.flight.reader import Scheduled, Stretch
from llm_serving.telemetry.statistics import Summary, summarize
from performance.terminal import format_number, format_table

__all__ = ["StretchFigures", "comparison_table", "figures_of"]

_PREEMPTIONS, _SWAPS = STATE_NAMES.index("preemptions"), STATE_NAMES.index("swaps")


@dataclass(frozen=True, slots=True)
class StretchFigures:
    """The summary of a part of a recording, in seconds. The time of a token is the arrival of its step's result."""

    requests: int
    refused: int
    ended: int
    steps: int
    output_tokens: int
    total_s: float
    """Time from the first arrival to the last token."""
    ttft: Summary
    tbt: Summary
    e2e: Summary
    preemptions: int
    swaps: int


def figures_of(stretch: Stretch, numbers: frozenset[int] | None = None) -> StretchFigures:
    """Summarises the requests that arrived in a part of a recording. ``numbers`` selects some requests, None all."""
    arrived = [arrival for arrival in arrivals(stretch) if numbers is None or arrival.number in numbers]
    served = [arrival for arrival in arrived if arrival.token_times]
    last = max((arrival.token_times[-1] for arrival in served), default=0.0)
    first = min((arrival.facts["arrival_time"] for arrival in arrived), default=last)
    num_steps, preemptions, swaps = _counts(stretch)
    return StretchFigures(
        requests=len(arrived),
        refused=sum(arrival.refusal is not None for arrival in arrived),
        ended=sum(arrival.end is not None for arrival in arrived),
        steps=num_steps,
        output_tokens=sum(arrival.num_output_tokens for arrival in arrived),
        total_s=max(last - first, 0.0),
        ttft=summarize(arrival.token_times[0] - arrival.facts["arrival_time"] for arrival in served),
        tbt=summarize(late - early for arrival in served for early, late in pairwise(arrival.token_times)),
        e2e=summarize(_e2e(arrival) for arrival in served if arrival.end in ("stop", "length")),
        preemptions=preemptions,
        swaps=swaps,
    )


def _e2e(arrival: Arrival) -> float:
    return arrival.token_times[-1] - float(arrival.facts["arrival_time"])


def _counts(stretch: Stretch) -> tuple[int, int, int]:
    steps, first, last = 0, None, None
    for event in stretch.events():
        if isinstance(event, Scheduled):
            steps += event.step is not None
            first = first or event.state
            last = event.state or last
    if first is None or last is None:
        return 0, 0, 0
    begun = stretch.segments[0].state.get("new", False)
    base = [0] * len(last) if begun else first
    return steps, last[_PREEMPTIONS] - base[_PREEMPTIONS], last[_SWAPS] - base[_SWAPS]


def comparison_table(columns: Sequence[tuple[str, StretchFigures]]) -> str:
    """Returns a table with one column for each named summary."""
    rows = [
        ["requests", *(str(each.requests) for _, each in columns)],
        ["refused", *(str(each.refused) for _, each in columns)],
        ["ended", *(str(each.ended) for _, each in columns)],
        ["output tokens", *(str(each.output_tokens) for _, each in columns)],
        ["steps", *(str(each.steps) for _, each in columns)],
        ["total time, s", *(format_number(each.total_s) for _, each in columns)],
    ]
    for name, title in (("ttft", "TTFT"), ("tbt", "TBT"), ("e2e", "end to end")):
        for figure in ("p50", "p99"):
            values = [getattr(getattr(each, name), figure) for _, each in columns]
            rows.append([f"{title} {figure}, ms", *(format_number(_ms(value)) for value in values)])
    rows.append(["preemptions", *(str(each.preemptions) for _, each in columns)])
    rows.append(["swaps", *(str(each.swaps) for _, each in columns)])
    return format_table(["", *(name for name, _ in columns)], rows)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
