"""Who failed first, over the logs of all ranks.

A rank that fails makes the others time out, so that the loudest errors are not the cause. In this order: the earliest
error that is a cause by itself; else the rank the others waited for that reported nothing; else the earliest error.
The same order of looking as in ``sources.HCCL_LOCATING`` and ``sources.MINDSPORE_CANN_CASES`` (HCCL & HCCP).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tools.diagnosis.log_lines import Sighting
from tools.diagnosis.log_reader import LogFile

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


def first_failure(files: Sequence[LogFile]) -> FirstFailure | None:
    """None when there is no error."""
    sightings = in_order(files)
    if not sightings:
        return None
    earliest = sightings[0]
    cause = next((each for each in sightings if not each.entry.follows), None)
    silent = _silent_rank(sightings)
    if cause is None and silent is not None:
        waiting = next(each for each in sightings if each.waited_for == silent)
        return FirstFailure(f"rank {silent}", "the others waited for it, and it reported no error itself", waiting)
    if cause is None:
        return FirstFailure(whose(earliest), f"the earliest error{_lead(earliest, sightings)}", earliest)
    if cause is earliest:
        return FirstFailure(whose(cause), f"the earliest error{_lead(cause, sightings)}", cause)
    why = f"the earliest error that is a cause; {earliest.entry.code} before it is mostly a consequence"
    return FirstFailure(whose(cause), why, cause)


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
