"""Compares a simulation with the load test that it repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from llm_serving.telemetry.statistics import percentile
from performance.program import UsageError
from performance.terminal import format_number, format_table

__all__ = ["GOAL", "Compared", "compare", "comparison_text", "mean_of_runs", "read_load_test"]

GOAL = 0.10
"""Maximum relative difference between a simulation and its load test."""
PERCENTS = (50, 95)


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity of a load test, such as the median TTFT: its measured and its simulated value."""

    name: str
    measured: float
    simulated: float
    deviation: float = 0.0
    """Standard deviation of single simulated runs, if ``simulated`` is the mean of several; otherwise 0.

    The deviation shows how much chance alone changes the figure, in simulated and in real runs of this length.
    """

    @property
    def error(self) -> float:
        """Relative error of the simulated value; 0 if both values are 0."""
        if self.measured == 0:
            return 0.0 if self.simulated == 0 else float("inf")
        return self.simulated / self.measured - 1.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error}


def read_load_test(path: Path) -> dict[str, Any]:
    """Reads the JSON file of a load test. Raises UsageError if the file has other content."""
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise UsageError(f"--validate: cannot read {path}: {error}") from error
    if not isinstance(content, dict) or "per_request" not in content:
        raise UsageError(f"--validate: {path} is not the JSON of a load test")
    return content


def compare(measured: dict[str, Any], simulated: dict[str, Any]) -> list[Compared]:
    """Compares two load tests by their JSON.

    Compares p50 and p95 of the requests' TTFT, TPOT, longest time between tokens and total time. Also compares p50, p95
    and p99 of all times between tokens, the run's total time from the first arrival, and tokens per second.
    """
    theirs = [one for one in measured["per_request"] if one["failure"] is None and one["ttft_ms"] is not None]
    ours = simulated["per_request"]
    rows = []
    for key, name in (
        ("ttft_ms", "TTFT ms"),
        ("tpot_ms", "TPOT ms"),
        ("max_tbt_ms", "longest TBT ms"),
        ("e2e_s", "end to end s"),
    ):
        for percent in PERCENTS:
            rows.append(
                Compared(f"{name} p{percent}", _percentile(theirs, key, percent), _percentile(ours, key, percent))
            )
    for name in ("p50", "p95", "p99"):
        if measured["tbt_ms"].get(name) is not None:
            rows.append(Compared(f"TBT ms {name}", measured["tbt_ms"][name], float(simulated["tbt_ms"][name] or 0.0)))
    rows.append(Compared("total s", measured["total_time_s"], simulated["total_time_s"]))
    rows.append(Compared("tokens/s", measured["output_tokens_per_s"], simulated["output_tokens_per_s"]))
    return rows


def mean_of_runs(runs: Sequence[Sequence[Compared]]) -> list[Compared]:
    """Combines the comparisons of several simulated runs with the same measured run.

    Each returned row has the mean of the simulated values and their standard deviation.
    """
    rows = []
    for figures in zip(*runs, strict=True):
        values = [one.simulated for one in figures]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append(Compared(figures[0].name, figures[0].measured, statistics.fmean(values), deviation))
    return rows


def _percentile(requests: Sequence[dict[str, Any]], key: str, percent: float) -> float:
    values = sorted(one[key] for one in requests if one[key] is not None)
    return percentile(values, percent) if values else 0.0


def comparison_text(rows: Sequence[Compared]) -> str:
    """Returns a table of the comparison, and a line that states how many simulated values have an error within the
    goal.
    """
    header = ["", "measured", "simulated", "error"]
    cells = [
        [row.name, format_number(row.measured), format_number(row.simulated), f"{100 * row.error:+.1f} %"]
        for row in rows
    ]
    if any(row.deviation for row in rows):
        header.append("one run +-")
        for row, line in zip(rows, cells, strict=True):
            line.append(f"{100 * row.deviation / row.simulated:.1f} %" if row.simulated else "-")
    table = format_table(header, cells)
    within = sum(abs(row.error) <= GOAL for row in rows)
    return f"{table}\n\n  {within} of {len(rows)} figures within {100 * GOAL:.0f} %"
