"""Reads one log or a folder of logs, and finds the errors in them with their rank and device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tools.diagnosis import log_lines
from tools.diagnosis.log_lines import DEVICE, PID, RANK, REMOTE_RANK, Sighting, number_in

MAX_FILES = 2000
"""Maximum number of files of a folder that are read."""
MAX_SIGHTINGS = 5000
"""Maximum number of errors that are kept for each file. Further errors usually repeat the earlier ones."""
NEARBY_LINES = 12
"""Number of lines after an error that may belong to its trace, and may name its device and rank."""
_SUFFIXES = (".log", ".txt", ".out", ".err", "")
_ROTATED = re.compile(r"\.log\.\d+$")


@dataclass(slots=True)
class LogFile:
    """A log file and the errors that were found in it."""

    path: str
    sightings: list[Sighting] = field(default_factory=list)
    lines: int = 0
    ranks: set[int] = field(default_factory=set)
    """All ranks that wrote lines in this file, with or without errors."""
    _time: datetime | None = None
    _owners: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    """Rank and device of each process id. A number is None until a line names it together with the process id."""

    def read(self, lines: Iterable[str]) -> LogFile:
        """Finds the errors in ``lines`` and returns this object."""
        file_rank, file_device = log_lines.rank_of_file(self.path), log_lines.device_of_file(self.path)
        if file_rank is not None:
            self.ranks.add(file_rank)
        for raw in lines:
            self.lines += 1
            self._take(log_lines.text_of(raw), file_rank, file_device)
        for sighting in self.sightings:
            rank, device = self._owners.get(sighting.pid, (None, None)) if sighting.pid is not None else (None, None)
            sighting.rank = rank if sighting.rank is None else sighting.rank
            sighting.device = device if sighting.device is None else sighting.device
        return self

    def _take(self, line: str, file_rank: int | None, file_device: int | None) -> None:
        own_time = log_lines.time_of(line)
        self._time = own_time or self._time
        pid, rank, device = (number_in(pattern, line) for pattern in (PID, RANK, DEVICE))
        if rank is not None:
            self.ranks.add(rank)
        if pid is not None and (rank is not None or device is not None):
            known = self._owners.get(pid, (None, None))
            self._owners[pid] = (known[0] if rank is None else rank, known[1] if device is None else device)
        entries = log_lines.entries_of(line) if len(self.sightings) < MAX_SIGHTINGS else []
        above = self._trace_above(pid, rank)
        # A line in the trace of an error (the lines after it) may name a rank or device that the error itself lacks.
        if not entries and above is not None:
            above.rank = rank if above.rank is None else above.rank
            above.device = device if above.device is None else above.device
        # An error inside the trace of another error comes from the same process.
        if entries and above is not None and own_time is None:
            pid, rank = above.pid if pid is None else pid, above.rank if rank is None else rank
            device = above.device if device is None else device
        rank, device = file_rank if rank is None else rank, file_device if device is None else device
        waited_for, text = number_in(REMOTE_RANK, line), line.strip()
        self.sightings += [
            Sighting(entry, self.path, self.lines, text, self._time, pid, rank, device, waited_for) for entry in entries
        ]

    def _trace_above(self, pid: int | None, rank: int | None) -> Sighting | None:
        """Returns the last error if the current line may belong to its trace (the lines after it), otherwise None.

        The line must be near the error, and must not name another process or rank.
        """
        if not self.sightings or self.lines - self.sightings[-1].line_number > NEARBY_LINES:
            return None
        last = self.sightings[-1]
        same = pid in (None, last.pid) and (rank is None or last.rank in (None, rank))
        return last if same else None


def read_logs(place: Path) -> list[LogFile]:
    """Reads a log file, or every log in a folder. Raises OSError if a file cannot be read."""
    root = place if place.is_dir() else place.parent
    return [_read_file(file, str(file.relative_to(root))) for file in _files(place)]


def _read_file(file: Path, name: str) -> LogFile:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return LogFile(name).read(lines)


def _files(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    candidates = sorted(file for file in place.rglob("*") if file.is_file())
    logs = (file for file in candidates if file.suffix in _SUFFIXES or _ROTATED.search(file.name))
    for number, file in enumerate(logs):
        if number == MAX_FILES:
            return
        yield file
