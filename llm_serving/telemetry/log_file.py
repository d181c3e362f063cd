"""A log file: closed to other users, rotated by size, and opened again after a rename or a signal.

Each write first compares the open file with the path. So a file that was moved or deleted gets no further line, and the
next line makes a new file. If the disk is full, lines are lost and counted, but the caller gets no error.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COMPLAINT_INTERVAL_S = 60.0
"""Minimum time between two reports that a log cannot be written."""
_OWNER_ONLY = 0o600
_OTHERS = 0o007


@dataclass(frozen=True, slots=True)
class Rotation:
    """The size at which a log file is rotated. A file never exceeds ``max_bytes``; 0 turns rotation off.

    A rotation renames ``server.log`` to ``server.log.1``, the old ``server.log.1`` to ``server.log.2``, and so on. At
    most ``keep_files`` renamed files are kept.
    """

    max_bytes: int = 0
    keep_files: int = 4

    @classmethod
    def of_mib(cls, max_mib: int, keep_files: int) -> Rotation:
        return cls(max_mib * 1024 * 1024, keep_files)


@dataclass(frozen=True, slots=True)
class LossReports:
    """Two functions that a log file calls if it cannot write lines."""

    notice: Callable[[int], bytes]
    """Makes the line that reports how many lines were lost. The log writes it as soon as writing works again."""
    complain: Callable[[str], None]
    """Reports to another place that a line could not be written, at most once in ``COMPLAINT_INTERVAL_S``."""


class DroppedLines:
    """Counts the lines that the logs of this process did not write, by reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"lost": 0, "suppressed": 0}

    def add(self, reason: str) -> None:
        """Counts a line: ``lost`` because it could not be written, or ``suppressed`` by a limit."""
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> dict[str, int]:
        """Returns the number of lines for each reason."""
        with self._lock:
            return dict(self._counts)


dropped_lines = DroppedLines()
_open_files: weakref.WeakSet[LogFile] = weakref.WeakSet()


def reopen_all() -> None:
    """Opens every log file of this process again, as after a rotation by another program."""
    for file in list(_open_files):
        file.reopen()


class LogFile:
    """Appends lines to the file ``path``. The folder is created. Threads may share the object.

    A new file has mode 0600. If the file exists, other users lose their permissions, and the group keeps its
    permissions. Only the constructor raises OSError. Later, a line that cannot be written is lost and counted.
    """

    def __init__(self, path: Path, losses: LossReports, rotation: Rotation | None = None) -> None:
        self.path = path
        self.lost_lines = 0
        self._losses = losses
        self._rotation = rotation or Rotation()
        # A signal handler may log while it interrupts a thread that holds this lock. So the lock must be re-entrant.
        self._lock = threading.RLock()
        self._unreported = False
        self._last_complaint = -COMPLAINT_INTERVAL_S
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor, self._torn = _open(path)
        self._identity = _identity(os.fstat(self._descriptor))
        _open_files.add(self)

    def write(self, line: bytes) -> None:
        """Appends a line, or several, in one write."""
        with self._lock:
            if self._descriptor < 0:
                self._lose()
                return
            self._follow(len(line))
            data = self._losses.notice(self.lost_lines) + line if self._unreported else line
            if self._torn:
                data = b"\n" + data
            written = 0
            try:
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
            except OSError as error:
                if written:
                    self._torn = data[written - 1] != ord("\n")
                self._unreported = True
                self._lose()
                self._complain(error)
                return
            self._torn = self._unreported = False

    def reopen(self) -> None:
        """Closes the file and opens the path again. If the path cannot be opened, keeps the open file."""
        with self._lock:
            if self._descriptor >= 0:
                self._replace_descriptor()

    def close(self) -> None:
        """Closes the file. Later lines are lost. May be called twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1
            _open_files.discard(self)

    def _follow(self, num_bytes: int) -> None:
        """Opens the path again if another program has moved, replaced or deleted the file.

        Rotates the file first if ``num_bytes`` more bytes would make it too large.
        """
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._replace_descriptor()
            return
        except OSError:
            return
        if _identity(found) != self._identity:
            self._replace_descriptor()
        elif found.st_size + num_bytes > self._rotation.max_bytes > 0 < found.st_size and stat.S_ISREG(found.st_mode):
            self._rotate()

    def _rotate(self) -> None:
        """Renames the files, the oldest first, and opens a new one. If this fails, the present file stays in use."""
        names = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self._rotation.keep_files + 1))]
        with contextlib.suppress(OSError):
            if len(names) == 1:
                self.path.unlink()
            for source, target in zip(reversed(names[:-1]), reversed(names[1:]), strict=True):
                with contextlib.suppress(FileNotFoundError):
                    source.replace(target)
        self._replace_descriptor()

    def _replace_descriptor(self) -> None:
        try:
            descriptor, torn = _open(self.path)
        except OSError as error:
            self._complain(error)
            return
        os.close(self._descriptor)
        self._descriptor, self._torn = descriptor, torn
        self._identity = _identity(os.fstat(descriptor))

    def _lose(self) -> None:
        self.lost_lines += 1
        dropped_lines.add("lost")

    def _complain(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._last_complaint >= COMPLAINT_INTERVAL_S:
            self._last_complaint = now
            self._losses.complain(
                f"cannot write the log {self.path}: {error.strerror}; {self.lost_lines} line(s) lost so far"
            )


def _open(path: Path) -> tuple[int, bool]:
    """Opens a file for appending. Returns its descriptor, and True if its last line is incomplete."""
    torn = False
    if path.is_file() and path.stat().st_size > 0:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & _OTHERS:
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~_OTHERS)
    return descriptor, torn


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
