"""Opens the files of a log that was rotated, as one stream in the order of time."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from tools.log_analysis.reader import LineSource, LogReader

STANDARD_INPUT = Path("-")


class _Joined:
    """Reads several sources one after the other. If the last line of a source has no newline, one is inserted."""

    def __init__(self, sources: Sequence[LineSource]) -> None:
        self._sources = list(sources)
        self._is_torn = False

    def readline(self, limit: int, /) -> bytes:
        while self._sources:
            if line := self._sources[0].readline(limit):
                self._is_torn = not line.endswith(b"\n")
                return line
            self._sources.pop(0)
            if self._is_torn and self._sources:
                self._is_torn = False
                return b"\n"
        return b""


@contextmanager
def open_logs(paths: Sequence[Path]) -> Iterator[LineSource]:
    """Opens the files of a log. Several files are read in the order of their first events. Raises OSError."""
    with ExitStack() as opened:
        if len(paths) > 1:
            paths = sorted(paths, key=_first_time)
        sources: list[LineSource] = [
            sys.stdin.buffer if path == STANDARD_INPUT else opened.enter_context(_open(path)) for path in paths
        ]
        yield sources[0] if len(sources) == 1 else _Joined(sources)


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _first_time(path: Path) -> float:
    """Returns the time of a file's first event. Standard input and files without events come last."""
    if path == STANDARD_INPUT:
        return float("inf")
    with _open(path) as file:
        return next((event.time for event in LogReader(file)), float("inf"))
