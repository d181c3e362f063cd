"""The event log: one JSON object for each line. Warnings and errors also go to standard error. So does the first event
that reports the end of such an error (``LogEvent.ends``).

    log = EventLog("output/server.log", level="info")
    log.event("request_arrival", request_id="cmpl-1", prompt_tokens=12)
    log.warning("agent stopped answering", event="agent_lost", agent=0)

Every line has ``time`` (Unix seconds), ``level`` and ``event``, then the caller's fields. A call never raises an
exception, and waits only for the disk. A value that cannot be encoded as JSON is replaced by a description. A line that
is too long is cut. If the disk is full, lost lines are counted and reported on standard error. When the log can be
written again, the event ``log_lines_lost`` records their number. Each line is appended in one write, so several
processes may share a file. ``log_file.py`` rotates the file, and follows another program that rotates it.

Clients can cause some events as often as they like. ``LogEvent.max_per_s`` limits the lines of an event in each second.
The event ``log_lines_suppressed`` records how many lines were not written for this reason.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

import msgspec

from llm_serving.errors import ConfigError
from llm_serving.telemetry.events import EVENTS
from llm_serving.telemetry.line_limit import LineLimit
from llm_serving.telemetry.log_file import LogFile, LossReports, Rotation, dropped_lines

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_LINE_BYTES = 64 * 1024
"""Maximum size of a line of the event log."""
SMALLEST_LINE_CAP = 8 * 1024
"""Smallest limit for the size of a line that a caller may choose."""
RESERVED = ("time", "level", "event")
MAX_DEPTH = 6
"""Maximum depth of nested values in an event that JSON cannot represent directly. Deeper values become text."""
SHORT_TEXT = 256
"""Maximum length in characters of a text in an event whose line is too long, or that JSON cannot represent directly."""
MIRROR_BYTES = 4000
"""Maximum bytes of a message on standard error. Below PIPE_BUF (4096), so a write to a pipe with space never waits."""
MIRROR_HEAD_BYTES, MIRROR_TAIL_BYTES = 1000, 2800
"""Bytes of the start and of the end of a long message that standard error shows."""

# JSON permits U+0085, U+2028 and U+2029 without an escape, but str.splitlines() ends a line at each of them. JavaScript
# ends a line at U+2028 and U+2029.
_LINE_BREAKS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)

_ENDED = frozenset(event.ends for event in EVENTS.values()) - {""}
"""Errors whose end another event reports."""
_ORIGIN = ("replica", "model")
"""Fields by which an error and the event that reports its end belong together."""


def _origin(fields: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the values of ``_ORIGIN`` as text, because values of any type are allowed, also those without a hash."""
    return tuple(str(fields.get(key)) for key in _ORIGIN)


class EventLog:
    """Writes events to the file ``path``, or to no file if it is None. Warnings and errors also go to standard error.

    Threads may share a log. The folder is created. If the file cannot be opened or ``level`` is unknown, the
    constructor raises ``ConfigError``. Other methods do not raise. ``lost_lines`` counts the lines that could not be
    written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        level: str = "info",
        *,
        mirror: bool = True,
        max_line_bytes: int = MAX_LINE_BYTES,
        clock: Callable[[], float] = time.time,
        rotation: Rotation | None = None,
    ) -> None:
        if level not in LEVELS:
            raise ConfigError(f"log_config.level: {level!r} is not one of {', '.join(LEVELS)}")
        assert max_line_bytes >= SMALLEST_LINE_CAP, max_line_bytes
        self.path = None if path is None else Path(path)
        self._threshold = LEVELS[level]
        self._mirror = mirror
        self._max_line_bytes = max_line_bytes
        self._clock = clock
        self._limits = {name: LineLimit(event.max_per_s) for name, event in EVENTS.items() if event.max_per_s}
        # A signal handler may log while it interrupts a thread that holds this lock. So the lock must be re-entrant.
        self._limits_lock = threading.RLock()
        self._has_suppressed = False
        self._unended: set[tuple[str, ...]] = set()
        """The errors on standard error whose end another event reports: names, with their replicas and models."""
        losses = LossReports(self._loss_notice, report_on_stderr)
        self._file = None if self.path is None else _open(self.path, losses, rotation)

    @property
    def lost_lines(self) -> int:
        """Number of lines that could not be written."""
        return 0 if self._file is None else self._file.lost_lines

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        """Writes one event as a line. ``fields`` may have any values; values that JSON does not know become text."""
        rank = LEVELS.get(level, LEVELS["info"])
        if self._unended:
            self._report_end(name, fields)
        if rank < self._threshold:
            return
        now = self._clock()
        if (name in self._limits or self._has_suppressed) and not self._admit(name, now):
            return
        record: dict[str, object] = {"time": now, "level": level, "event": name}
        for key, value in fields.items():
            record[f"{key}_" if key in RESERVED else key] = value
        if self._file is not None:
            self._file.write(encode_line(record, self._max_line_bytes))
        if self._mirror and rank >= LEVELS["warning"]:
            report_on_stderr(readable(record))
            if name in _ENDED:
                self._unended.add((name, *_origin(fields)))

    def debug(self, message: str, /, *, event: str = "debug", **fields: object) -> None:
        self.event(event, level="debug", message=message, **fields)

    def info(self, message: str, /, *, event: str = "info", **fields: object) -> None:
        self.event(event, level="info", message=message, **fields)

    def warning(self, message: str, /, *, event: str = "warning", **fields: object) -> None:
        self.event(event, level="warning", message=message, **fields)

    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None:
        self.event(event, level="error", message=message, **fields)

    def close(self) -> None:
        """Closes the file. Later events only go to standard error. May be called twice."""
        if self._has_suppressed:
            self._admit("", float("inf"))
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _admit(self, name: str, now: float) -> bool:
        """Returns whether a line of the event ``name`` may be written at the time ``now``, in seconds.

        Also logs, for each event, how many lines were suppressed in a second that is over.
        """
        with self._limits_lock:
            for limited, limit in self._limits.items():
                if number := limit.take_suppressed(now):
                    self.event("log_lines_suppressed", of=limited, lines=number)
            limit_of_name = self._limits.get(name)
            is_admitted = limit_of_name is None or limit_of_name.admits(now)
            self._has_suppressed = any(limit.num_suppressed for limit in self._limits.values())
        if not is_admitted:
            dropped_lines.add("suppressed")
        return is_admitted

    def _report_end(self, name: str, fields: Mapping[str, object]) -> None:
        """Shows the event ``name`` on standard error if it reports the end of an error that was shown there."""
        event = EVENTS.get(name)
        if event is None or not event.ends:
            return
        ended = (event.ends, *_origin(fields))
        if ended in self._unended:
            self._unended.discard(ended)
            origin = {key: fields[key] for key in _ORIGIN if key in fields}
            record = {"time": self._clock(), "level": "info", "event": name, "message": event.meaning, **origin}
            report_on_stderr(readable(record))

    def _loss_notice(self, lines: int) -> bytes:
        record = {"time": self._clock(), "level": "warning", "event": "log_lines_lost", "lines": lines}
        return encode_line(record, self._max_line_bytes)


def _open(path: Path, losses: LossReports, rotation: Rotation | None) -> LogFile:
    try:
        return LogFile(path, losses, rotation)
    except OSError as error:
        raise ConfigError(f"log_config.path: cannot open {str(path)!r}: {error.strerror or error}") from error


def encode_line(record: Mapping[str, object], max_bytes: int = MAX_LINE_BYTES) -> bytes:
    """Returns ``record`` as a line of JSON with at most ``max_bytes`` bytes. Long values are cut if necessary."""
    line = _encode(record)
    if len(line) > max_bytes:
        size = len(line)
        line = _encode({key: _shorten(value) for key, value in record.items()} | {"line_bytes_before_cut": size})
        if len(line) > max_bytes:
            kept = {key: _shorten(record[key]) for key in (*RESERVED, "request_id", "message") if key in record}
            line = _encode(kept | {"line_bytes_before_cut": size})
    return line


def readable(record: Mapping[str, object]) -> str:
    """Returns ``record`` as text: time, level, event, message, then the fields. A traceback has its own lines."""
    fields = dict(record)
    stamp = fields.pop("time", 0.0)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp if isinstance(stamp, float) else 0.0))
    text = f"{clock} {_text(fields.pop('level', '')).upper()} {_text(fields.pop('event', ''))}"
    message = fields.pop("message", None)
    traceback = fields.pop("traceback", None)
    if message is not None:
        text += f": {_text(message)}"
    if fields:
        text += f" ({', '.join(f'{key}={_text(value)}' for key, value in fields.items())})"
    if traceback is not None:
        text += f"\n{_text(traceback)}"
    return text.rstrip().replace("\n", "\n    ")


def report_on_stderr(text: str) -> None:
    """Writes ``text`` to standard error. Drops the text if standard error is closed, or is a pipe without space."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > MIRROR_BYTES:
        data = data[:MIRROR_HEAD_BYTES] + b"\n    ... more in the log ...\n" + data[-MIRROR_TAIL_BYTES:]
    try:
        if _takes_output(sys.stderr):
            sys.stderr.write(data.decode("utf-8", "replace") + "\n")
            sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return


def _takes_output(stream: TextIO) -> bool:
    """Returns True if a write to ``stream`` of at most PIPE_BUF bytes would not wait."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # the stream is not a file, so a write does not wait
        return True
    return bool(select.select([], [descriptor], [], 0)[1])


def _encode(record: Mapping[str, object]) -> bytes:
    try:
        line = _ENCODER.encode(record)
    except Exception:  # the value has lone surrogates, a cycle or a failing __str__
        line = _ENCODER.encode(_plain(record, MAX_DEPTH))
    if not line.isascii():
        for raw, escaped in _LINE_BREAKS:
            line = line.replace(raw, escaped)
    return line + b"\n"


def _encode_unknown(value: object) -> object:
    item = getattr(value, "item", None)  # NumPy scalars have the method ``item``
    if callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_unknown)


def _plain(value: object, depth: int) -> object:
    """Returns ``value`` in types that JSON can always encode."""
    if value is None or isinstance(value, bool | int | float):
        return value if type(value) in (bool, int, float, type(None)) else _text(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if depth > 0 and isinstance(value, Mapping):
        return {_text(key): _plain(item, depth - 1) for key, item in value.items()}
    if depth > 0 and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in value]
    return _shorten(_text(value))


def _shorten(value: object) -> object:
    """Returns ``value`` if it is short, otherwise its beginning as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else _text(value)
    if len(text) <= SHORT_TEXT:
        return value
    return f"{text[:SHORT_TEXT]}... [{len(text) - SHORT_TEXT} more characters]"


def _text(value: object) -> str:
    """Returns ``str(value)`` without control characters, which a terminal would execute. Never raises."""
    try:
        text = str(_encode_unknown(value))
    except Exception as error:
        text = f"<{type(value).__name__}: str() failed with {type(error).__name__}>"
    return printable(text)


def printable(text: str) -> str:
    """Returns ``text`` with control characters escaped, except newlines and tabs. A terminal would execute them."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in text
    )
