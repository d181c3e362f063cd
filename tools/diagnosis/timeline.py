"""Finds the rank that failed first, from the logs of all ranks.

If a rank fails, the other ranks time out, so the most frequent errors are not the cause. Some known errors, such as a
timeout, are usually the result of another failure (``Entry.follows``). Every other error can be a cause. The first of
these rules that applies gives the first failure:

    1. the earliest error that can be a cause, unless it was logged clearly after the earliest error
    2. a rank for which other ranks waited, and which logged no error
    3. the earliest error

``sources.HCCL_LOCATING`` and ``sources.MINDSPORE_CANN_CASES`` (HCCL & HCCP) describe the same method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tools.diagnosis.log_lines import Sighting
from tools.diagnosis.log_reader import LogFile

INCIDENT_GAP = timedelta(hours=1)
"""If no error is logged for longer than this time, a new incident begins. The time is twice HCCL_EXEC_TIMEOUT."""
TOLERANCE = timedelta(seconds=60)
"""Maximum time by which an error that is a cause may be logged after the earliest error.

Ranks have different clocks and write their logs with a delay, so a cause may seem to be later than its results.
"""
_UNKNOWN = datetime.max


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The process that failed first (``who``), the reason for this conclusion (``why``), and its logged error."""

    who: str
    why: str
    sighting: Sighting


def in_order(files: Sequence[LogFile]) -> list[Sighting]:
    """Returns all errors sorted by time. Errors without a time are last, in the order of their lines."""
    everything = [sighting for file in files for sighting in file.sightings]
    return sorted(everything, key=lambda each: (each.time or _UNKNOWN, each.file, each.line_number))


def incidents(sightings: Sequence[Sighting]) -> list[list[Sighting]]:
    """Divides sorted errors into incidents, wherever two errors are more than ``INCIDENT_GAP`` apart.

    Errors without a time belong to the last incident.
    """
    found: list[list[Sighting]] = []
    last: datetime | None = None
    for sighting in sightings:
        if not found or (last is not None and sighting.time is not None and sighting.time - last > INCIDENT_GAP):
            found.append([])
        found[-1].append(sighting)
        last = sighting.time or last
    return found


def first_failure(incident: Sequence[Sighting]) -> FirstFailure:
    """Returns the first failure of an incident, which must have at least one error."""
    earliest = incident[0]
    cause = next((each for each in incident if not each.entry.follows and _no_later(each, earliest)), None)
    silent = _silent_rank(incident)
    if cause is None and silent is not None:
        waiting = next(each for each in incident if each.waited_for == silent)
        return FirstFailure(f"rank {silent}", "the others waited for it, and it reported no error itself", waiting)
    if cause is None or cause is earliest:
        return FirstFailure(whose(earliest), f"the earliest error{_lead(earliest, incident)}", earliest)
    why = f"the earliest error that is a cause; {earliest.entry.code} before it is usually a result of another failure"
    return FirstFailure(whose(cause), why, cause)


def _no_later(cause: Sighting, consequence: Sighting) -> bool:
    if cause.time is None or consequence.time is None:
        return True
    return cause.time - consequence.time <= TOLERANCE


def whose(sighting: Sighting) -> str:
    """Returns the known origin of an error, such as ``rank 1, device 1, process 4711 (agent_1.log)``."""
    parts = [
        f"{name} {value}"
        for name, value in (("rank", sighting.rank), ("device", sighting.device), ("process", sighting.pid))
        if value is not None
    ]
    return f"{', '.join(parts)} ({sighting.file})" if parts else sighting.file


def _silent_rank(sightings: Sequence[Sighting]) -> int | None:
    """Returns the rank that logged no error and for which the largest number of other ranks waited, or None."""
    reported = {each.rank for each in sightings}
    waited = Counter(each.waited_for for each in sightings if each.waited_for is not None)
    silent = [(count, -rank) for rank, count in waited.items() if rank not in reported]
    return -max(silent)[1] if silent else None


def _lead(first: Sighting, sightings: Sequence[Sighting]) -> str:
    """Returns a text with the time from ``first`` to the first error of another rank, or an empty text without one."""
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
