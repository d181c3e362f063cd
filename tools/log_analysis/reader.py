"""Reads the lines of an event log one by one. Counts the lines that are not events, such as truncated ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

MAX_LINE_BYTES = 1024 * 1024
"""Maximum size of a line of the log."""
MAX_TIME = 1e11
"""Unix seconds in the year 5138. A larger number in a log line is not a time, so the line is rejected."""
KEPT_BAD_LINES = 5
"""Number of first unreadable lines that are kept with their reasons."""


class LineSource(Protocol):
    """A stream of lines, such as a binary file."""

    def readline(self, limit: int, /) -> bytes:
        """Returns the next line with its newline, at most ``limit`` bytes. At the end of the stream, returns b""."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A line of the log: Unix seconds, level, name, and all fields."""

    time: float
    level: str
    name: str
    fields: dict[str, Any]


@dataclass(slots=True)
class LogReader:
    """Iterates over the events of a log file, and counts lines. Blank lines do not count."""

    file: LineSource
    lines: int = 0
    bad_lines: int = 0
    bad_examples: list[str] = field(default_factory=list)
    """The first bad lines, as ``line N: reason``."""
    _line_number: int = 0

    def __iter__(self) -> Iterator[LogEvent]:
        decoder = msgspec.json.Decoder(dict[str, Any])
        while True:
            line = self.file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            self._line_number += 1
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                self._skip_line()
                self.lines += 1
                self.reject(f"longer than {MAX_LINE_BYTES} bytes")
                continue
            if not line.strip():
                continue
            self.lines += 1
            event = self._parse(decoder, line)
            if event is not None:
                yield event

    def reject(self, reason: str) -> None:
        """Counts the line that was read last as unreadable."""
        self.bad_lines += 1
        if len(self.bad_examples) < KEPT_BAD_LINES:
            self.bad_examples.append(f"line {self._line_number}: {reason}")

    def _parse(self, decoder: msgspec.json.Decoder[dict[str, Any]], line: bytes) -> LogEvent | None:
        try:
            fields = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.reject(f"not a JSON object ({error})")
            return None
        time, name, level = fields.get("time"), fields.get("event"), fields.get("level", "info")
        if not isinstance(time, float | int) or not math.isfinite(time) or not 0 <= time < MAX_TIME:
            self.reject("no valid 'time'")
            return None
        if not isinstance(name, str) or not isinstance(level, str):
            self.reject("no valid 'event' or 'level'")
            return None
        return LogEvent(float(time), level, name, fields)

    def _skip_line(self) -> None:
        while True:
            rest = self.file.readline(MAX_LINE_BYTES)
            if not rest or rest.endswith(b"\n"):
                return
