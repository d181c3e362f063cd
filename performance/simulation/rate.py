"""Finds the highest request rate at which a deployment meets its objectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from performance.program import UsageError
from performance.simulation.runs import SimulatedRun

__all__ = ["RateFound", "find_rate", "meets_objectives"]

PRECISION = 0.02
"""The search ends when the rate is known to this relative precision."""
LOWEST_RATE = 1 / 64
"""Lowest rate that is tried, in requests per second."""
HIGHEST_RATE = 65_536.0
"""Highest rate that is tried, in requests per second."""

SimulateAt = Callable[[float], SimulatedRun]


@dataclass(frozen=True, slots=True)
class RateFound:
    """The highest request rate that met the objectives, with its run; ``above`` is the lowest rate that missed them."""

    rate: float
    above: float
    run: SimulatedRun
    tried: int

    def as_json(self) -> dict[str, Any]:
        return {"rate": self.rate, "above": self.above, "tried": self.tried, "run": self.run.as_json(per_request=False)}


def meets_objectives(run: SimulatedRun) -> bool:
    """Returns True if p99 of TTFT and of the time between tokens meet the objectives and no request failed."""
    figures, options = run.figures, run.run.options
    between_ms = options.slo_tpot_ms if options.slo_tbt_ms is None else options.slo_tbt_ms
    return (
        not figures.failed
        and (figures.ttft_ms.p99 or 0.0) <= options.slo_ttft_ms
        and (figures.tbt_ms.p99 or 0.0) <= between_ms
    )


def find_rate(simulate_at: SimulateAt, first: float) -> RateFound:
    """Searches the highest request rate that meets the objectives, beginning with the rate ``first``.

    Doubles or halves the rate until one rate meets the objectives and twice this rate does not. Then bisects.
    The figures of a finite load vary a little with the rate, so the result depends on the run's length and seed. Raises
    UsageError if no rate meets the objectives, or if every rate does.
    """
    run, rate, tried = simulate_at(first), first, 1
    good: tuple[float, SimulatedRun] | None = None
    bad: float | None = None
    while good is None or bad is None:
        if meets_objectives(run):
            good, rate = (rate, run), rate * 2
        else:
            bad, rate = rate, rate / 2
        if good is None or bad is None:
            _check_range(rate, run)
            run, tried = simulate_at(rate), tried + 1
    while bad - good[0] > PRECISION * good[0]:
        rate = (good[0] + bad) / 2
        run, tried = simulate_at(rate), tried + 1
        if meets_objectives(run):
            good = (rate, run)
        else:
            bad = rate
    return RateFound(good[0], bad, good[1], tried)


def _check_range(rate: float, run: SimulatedRun) -> None:
    if LOWEST_RATE <= rate <= HIGHEST_RATE:
        return
    figures = run.figures
    raise UsageError(
        f"--find-rate: {'no rate meets' if rate < LOWEST_RATE else 'every rate meets'} the objectives (at "
        f"{run.run.options.rate:g} requests/s: TTFT p99 {figures.ttft_ms.p99} ms, TBT p99 {figures.tbt_ms.p99} ms)"
    )
