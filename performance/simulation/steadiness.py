"""A load between two probes of the machine's speed: evidence only where the two agree, and the cores were its own.

A comparison of a simulation with a real run says something of the simulation while the machine holds its speed. Whether
it did is seen from a short probe, the same each time, right before the load and right after, and from what others took
of the cores' time meanwhile. What was compared is never looked at.
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
"""How far two probes may be apart. Those of a machine at rest repeat within 1 to 2 %; speed that moves evenly from one
probe to the other is known by their mean, and one that does not by no worse than half their distance, 2 %."""
OTHERS_TOLERANCE = 0.02
"""Share of the cores' time that others may take. No probe sees what they do during the load: a second of one of two
cores in a part of 25 s, which all steps of that second wait for, doubles pauses, and so moves the tails."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How fast the machine was."""

    runs: list[LoadRun]
    slowdown: Slowdown
    """How many times as long as the fit says its steps took."""


@dataclass(frozen=True, slots=True)
class Try:
    """A load that ran between two probes."""

    before: Probe
    run: LoadRun
    after: Probe
    others: float = 0.0
    """Share of the cores' time that others took during the run."""

    @property
    def slowdown(self) -> Slowdown:
        """Of the machine meanwhile: the mean of the probes."""
        return Slowdown.of_all([self.before.slowdown, self.after.slowdown], statistics.fmean)

    @property
    def distance(self) -> float:
        """Between the probes' steps, relative to the faster."""
        low, high = sorted((self.before.slowdown.steps, self.after.slowdown.steps))
        return high / low - 1.0

    @property
    def unrest(self) -> float:
        """In tolerances: above 1 it is no evidence."""
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
    run: Callable[[], tuple[LoadRun, float]], probe: Callable[[], Probe], before: Probe, most: int
) -> list[Try]:
    """Run a load, with a probe after it, until it was steady, ``most`` times at most. ``run`` gives the share of the
    cores that others took, too. ``before``: a probe right before the first time; the probe after a try is the one
    before the next."""
    tries: list[Try] = []
    while len(tries) < most and not (tries and tries[-1].is_steady):
        measured, others = run()
        tries.append(Try(before, measured, probe(), others))
        before = tries[-1].after
    return tries


def steadiest(tries: Sequence[Try]) -> Try:
    """The try of a part that says most."""
    return min(tries, key=lambda one: one.unrest)


def is_evidence(parts: Sequence[Sequence[Try]]) -> bool:
    """Of a load, from the tries of its parts: whether more than half of the parts were steady at last."""
    return 2 * len(_steady(parts)) > len(parts)


def comparable(parts: Sequence[Sequence[Try]]) -> list[Try]:
    """The tries of a load that count: of the parts that were steady at last; of all parts where it is no evidence."""
    return _steady(parts) if is_evidence(parts) else [steadiest(tries) for tries in parts]


def _steady(parts: Sequence[Sequence[Try]]) -> list[Try]:
    return [one for one in map(steadiest, parts) if one.is_steady]


def joined(runs: Sequence[LoadRun]) -> LoadRun:
    """Several runs as one, each beginning when the one before has ended."""
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
