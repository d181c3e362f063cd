"""Who failed first, over the logs of all ranks.

A rank that fails makes the others time out, so that the loudest errors are not the cause. In this order: the earliest
error that is a cause by itself, if it is no later than the first consequence; else the rank the others waited for that
reported nothing; else the earliest error. So do ``sources.HCCL_LOCATING`` and ``sources.MINDSPORE_CANN_CASES`` (HCCL &
HCCP) look for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tools.diagnosis.log_lines import Sighting
from tools.diagnosis.log_reader import LogFile

INCIDENT_GAP = timedelta(hours=1)
"""Errors further apart are not of the same failure: twice HCCL_EXEC_TIMEOUT."""
SAME_MOMENT = timedelta(seconds=60)
"""So much later a cause may be written than its first consequence: other machines, other clocks, late writers."""
_UNKNOWN = datetime.max


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The verdict, in words, and the sighting it rests on."""

    who: str
    why: str
    sighting: Sighting


def in_order(files: Sequence[LogFile]) -> list[Sighting]:
    """All sightings by time; those without a time last, in the order of their lines."""
    everything = [sighting for file in files for sighting in file.sightings]
    return sorted(everything, key=lambda each: (each.time or _UNKNOWN, each.file, each.line_number))


def incidents(sightings: Sequence[Sighting]) -> list[list[Sighting]]:
    """Sightings in order of time, split where nothing happened for long. Those without a time go with the last."""
    found: list[list[Sighting]] = []
    last: datetime | None = None
    for sighting in sightings:
        if not found or (last is not None and sighting.time is not None and sighting.time - last > INCIDENT_GAP):
            found.append([])
        found[-1].append(sighting)
        last = sighting.time or last
    return found


def first_failure(incident: Sequence[Sighting]) -> FirstFailure:
    """``incident``: at least one sighting, in order of time."""
    earliest = incident[0]
    cause = next((each for each in incident if not each.entry.follows and _no_later(each, earliest)), None)
    silent = _silent_rank(incident)
    if cause is None and silent is not None:
        waiting = next(each for each in incident if each.waited_for == silent)
        return FirstFailure(f"rank {silent}", "the others waited for it, and it reported no error itself", waiting)
    if cause is None or cause is earliest:
        return FirstFailure(whose(earliest), f"the earliest error{_lead(earliest, incident)}", earliest)
    why = f"the earliest error that is a cause; {earliest.entry.code} before it is mostly a consequence"
    return FirstFailure(whose(cause), why, cause)


def _no_later(cause: Sighting, consequence: Sighting) -> bool:
    if cause.time is None or consequence.time is None:
        return True
    return cause.time - consequence.time <= SAME_MOMENT


def whose(sighting: Sighting) -> str:
    """``rank 1, device 1, process 4711 (agent_1.log)``, with what is known."""
    parts = [
        f"{name} {value}"
        for name, value in (("rank", sighting.rank), ("device", sighting.device), ("process", sighting.pid))
        if value is not None
    ]
    return f"{', '.join(parts)} ({sighting.file})" if parts else sighting.file


def _silent_rank(sightings: Sequence[Sighting]) -> int | None:
    """The rank most waited for among those that reported no error."""
    reported = {each.rank for each in sightings}
    waited = Counter(each.waited_for for each in sightings if each.waited_for is not None)
    silent = [(count, -rank) for rank, count in waited.items() if rank not in reported]
    return -max(silent)[1] if silent else None


def _lead(first: Sighting, sightings: Sequence[Sighting]) -> str:
    """How much earlier than the first error of anybody else."""
    others = (each for each in sightings if (each.rank, each.file) != (first.rank, first.file) and each.time)
    other = next(others, None)
    if other is None or other.time is None or first.time is None:
        return ""
    return f", {_span(other.time - first.time)} before {whose(other)}"


def _span(span: timedelta) -> str:
    seconds = span.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
