"""Decides whether the machine's speed was constant during a real run.

A real run can be compared with a simulation only if the speed was constant. To measure the speed, a probe runs directly
before and after each part of a load. A probe is a short load that is always the same. A part is steady if both probes
ran at nearly the same speed and other processes took little of the cores' time. The decision does not use the figures
that are compared later.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from performance.load.client import LoadRun
from performance.load.stream import RequestRecord
from performance.simulation.slowdown import Slowdown

__all__ = [
    *("OTHERS_TOLERANCE", "TOLERANCE", "Probe", "Try"),
    *("comparable", "is_evidence", "joined", "run_until_steady", "steadiest"),
]

TOLERANCE = 0.04
"""Maximum relative difference between the machine's speed before a run and after it. The mean of both speeds is used
for the run. If the speed changes evenly, this mean is exact. Otherwise it is wrong by at most half of the difference
(2 %). On an idle machine, two measurements of the speed differ by 1 to 2 %.
"""
OTHERS_TOLERANCE = 0.02
"""Maximum fraction of the cores' time that other processes may take. The probes do not see those processes. If they
take one of two cores for one second of 25, all steps of that second wait. This changes the tail latencies.
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe: runs of short loads that are always the same, and the speed of the machine during them."""

    runs: list[LoadRun]
    slowdown: Slowdown
    """Measured step times divided by fitted step times."""


@dataclass(frozen=True, slots=True)
class Try:
    """One try: a part of a load on the real server (not simulated), and the machine's speed before and after."""

    before: Probe
    run: LoadRun
    after: Probe
    others: float = 0.0
    """Fraction of the cores' time that other processes took during the run."""

    @property
    def slowdown(self) -> Slowdown:
        """Returns the mean slowdown of the two probes."""
        return Slowdown.of_all([self.before.slowdown, self.after.slowdown], statistics.fmean)

    @property
    def distance(self) -> float:
        """Returns the relative difference of the two probes' step times."""
        low, high = sorted((self.before.slowdown.steps, self.after.slowdown.steps))
        return high / low - 1.0

    @property
    def unrest(self) -> float:
        """Returns how unsteady the machine was during this run. A run with a result above 1 must not be compared
        with a simulation.

        The result is the larger of two ratios. One is the speed difference of the two probes, divided by ``TOLERANCE``.
        The other is the fraction of time that other processes took, divided by ``OTHERS_TOLERANCE``.
        """
        return max(self.distance / TOLERANCE, self.others / OTHERS_TOLERANCE)

    @property
    def is_steady(self) -> bool:
        return self.unrest <= 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            "before": asdict(self.before.slowdown),
            "after": asdict(self.after.slowdown),
            "others": self.others,
            "steady": self.is_steady,
        }


def run_until_steady(
    run: Callable[[], tuple[LoadRun, float]], probe: Callable[[], Probe], before: Probe, max_tries: int
) -> list[Try]:
    """Runs a part of a load until a try is steady, at most ``max_tries`` times. Returns all tries.

    ``run`` runs the part. It returns the run and the fraction of the cores' time that other processes took. ``before``
    is the probe before the first try. After each try, ``probe`` runs a probe, which is also the probe before the next
    try.
    """
    tries: list[Try] = []
    while len(tries) < max_tries and not (tries and tries[-1].is_steady):
        measured, others = run()
        tries.append(Try(before, measured, probe(), others))
        before = tries[-1].after
    return tries


def steadiest(tries: Sequence[Try]) -> Try:
    """Returns the try with the smallest ``unrest``."""
    return min(tries, key=lambda one: one.unrest)


def is_evidence(parts: Sequence[Sequence[Try]]) -> bool:
    """Returns True if a load may be compared: more than half of its parts had a steady try."""
    return 2 * len(_steady(parts)) > len(parts)


def comparable(parts: Sequence[Sequence[Try]]) -> list[Try]:
    """Chooses the tries that are compared with a simulation, one for each compared part of a load.

    The compared parts are the steady parts, or all parts if too few parts were steady (``is_evidence``).
    """
    return _steady(parts) if is_evidence(parts) else [steadiest(tries) for tries in parts]


def _steady(parts: Sequence[Sequence[Try]]) -> list[Try]:
    return [one for one in map(steadiest, parts) if one.is_steady]


def joined(runs: Sequence[LoadRun]) -> LoadRun:
    """Joins several runs into one run: shifts the times of each run so that it begins when the previous run has
    ended.
    """
    records: list[RequestRecord] = []
    end = start = runs[0].start
    for run in runs:
        records += [_later(record, end - run.start, len(records) + place) for place, record in enumerate(run.records)]
        end += run.total_time_s
    return replace(runs[0], records=records, start=start, client_cpu_s=sum(run.client_cpu_s for run in runs))


def _later(record: RequestRecord, seconds: float, index: int) -> RequestRecord:
    return replace(
        record,
        index=index,
        due=record.due + seconds,
        sent=record.sent + seconds,
        piece_times=array("d", [moment + seconds for moment in record.piece_times]),
        end=None if record.end is None else record.end + seconds,
    )
