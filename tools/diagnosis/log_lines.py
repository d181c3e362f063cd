"""Extracts time, process, rank, device and errors from log lines of any kind.

    [ERROR] HCCL(2717288,python3):2025-07-23-03:47:57.070.463 [hccl_socket.cc:100] ...     plog and MindSpore
    EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. ...       a CANN message
    [PID: 210907] 2026-04-09-21:56:40.384.694 Memory_Allocation_Failure(EL0004): ...       the same since CANN 8.5
    [ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 ...             torch_npu
    2026-11-21 12:35:33,571 ERROR agent.worker: ...                                        an agent of this project
    {"time":1795264533.57,"level":"error","event":"agent_lost","message":"agent 0, ..."}   server.log

``sources.LOG_FORMAT`` describes plog lines.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime

from tools.diagnosis.catalogue import Entry, find, find_in_words

MAX_LINE_CHARS = 8192
"""Number of characters after which the text of a log line is cut."""

_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[-T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{3})(?:\.?(\d{3}))?)?")
_QUIET = re.compile(r"\s*(\[rank\d+\]:\s*)?\[(INFO|DEBUG|EVENT|TRACE)\]|^\S+ \S+ (INFO|DEBUG) ")
_LETTER_CODE = re.compile(r"(?<![A-Za-z0-9_/-])(E[1-9A-FH-PZ]\d{4})(?![A-Za-z0-9_])")
_NUMBER_CODE = re.compile(
    r"(?i)(?:error code(?: is)?|errcode|errorcode|ret(?:code|val)?|result|failed|code)"
    r"\s*(?:is|=|:|\[|, result = |)\s*[:=]?\s*\[?([1235]\d{5})(?!\d)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_INFO_EVENTS = ("request_refused", "log_lines_lost")
"""Events of ``server.log`` with level info that are explained like errors."""
_MESSAGE_FIELDS = ("code", "message", "reason", "error", "traceback")
_ADVICE_TEXT = re.compile(r"search for the keyword|^\s*(?:\S+ )?(?:Solution|Possible Cause):")
PID = re.compile(r"(?i)\bpid[:=]\s*(\d+)|\] [A-Z_]+\((\d+),|^\[[A-Z]+\] [A-Z_]+\((\d+),")
RANK = re.compile(
    r"RankID:(\d+)|\[rank(\d+)\]|\brankId\[(\d+)|\brank_id[=:]\s*(\d+)|\bagent (\d+)\b|(?:_TP|\brank=)(\d+)[ )]"
)
DEVICE = re.compile(
    r"\bDevice:(\d+)|\bdevice_?[iI]d(?:=|:|\[| )\s*(\d+)|\bdevId[=:]?\s*(\d+)|chipId:(\d+)|\bdevice ID (\d+)|"
    r"\bDevice (\d+) |\bdevice (\d+) (?:failed|call)|\(NPU (\d+);"
)
REMOTE_RANK = re.compile(r"(?:remote|peer) rank:?\s*\[?(\d+)")
_FILE_RANK = re.compile(r"(?:^|[/_.-])(?:rank|agent|worker)[_-]?(\d+)(?=[/_.-]|$)")
_FILE_DEVICE = re.compile(r"(?:^|/)device-(\d+)(?=[/_])")


@dataclass(slots=True)
class Sighting:
    """A known error that was found in a log, with its place, time and process."""

    entry: Entry
    file: str
    line_number: int
    text: str
    time: datetime | None
    """Local time of the machine that wrote the line. A line without a time gets the time of the line above."""
    pid: int | None
    rank: int | None
    device: int | None
    waited_for: int | None
    """The rank for which the process waited, if the message names it."""


def text_of(line: str) -> str:
    """Returns a log line without newline and terminal colours. Shortens a long line, so that searches are fast.

    An event of this project's server, which is JSON, becomes plain text.
    """
    return (_event_text(line) or _COLOUR.sub("", line.rstrip("\r\n")))[:MAX_LINE_CHARS]


def _event_text(line: str) -> str | None:
    """Returns ``2026-11-21 12:35:33.571000 ERROR agent_lost: ...`` for an event of ``server.log``, otherwise None."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
        stamp, name, level = datetime.fromtimestamp(float(fields["time"])), fields["event"], fields["level"]
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError):
        return None
    shown = "WARNING" if name in _INFO_EVENTS and level == "info" else str(level).upper()
    message = " ".join(str(fields[key]) for key in _MESSAGE_FIELDS if fields.get(key) is not None)
    return f"{stamp:%Y-%m-%d %H:%M:%S.%f} {shown} {name}: {message}".replace("\n", " | ")


def time_of(line: str) -> datetime | None:
    """Returns the time stamp of a log line, or None if it has none."""
    match = _STAMP.search(line)
    if match is None:
        return None
    year, month, day, hour, minute, second, milli, micro = match.groups()
    fraction = int(milli or 0) * 1000 + int(micro or 0)
    try:
        return datetime(int(year), int(month), int(day), int(hour), int(minute), int(second), fraction)
    except ValueError:
        return None


def entries_of(line: str) -> list[Entry]:
    """Returns the known errors that a line names by code or describes in words, or [] if its level is below error."""
    if _QUIET.match(line) or _ADVICE_TEXT.search(line):
        return []
    codes = [*_LETTER_CODE.findall(line), *_NUMBER_CODE.findall(line)]
    found = [entry for code in dict.fromkeys(codes) if (entry := find(code)) is not None]
    words = find_in_words(line)
    if words is not None and words not in found and all(each.follows for each in found):
        found.append(words)
    return found


def rank_of_file(path: str) -> int | None:
    """Returns the rank in names such as ``agent_1.log``, ``rank_3/...`` and ``worker_0.log`` (msrun), or None."""
    matches = _FILE_RANK.findall(path)
    return int(matches[-1]) if matches else None


def device_of_file(path: str) -> int | None:
    """Returns the device in names such as ``device-3/device-3_2025....log``, or None."""
    return number_in(_FILE_DEVICE, path)


def number_in(pattern: re.Pattern[str], text: str) -> int | None:
    """Returns the number of the first match of ``pattern`` (PID, RANK, DEVICE or REMOTE_RANK) in a line, or None."""
    match = pattern.search(text)
    return None if match is None else int(next(group for group in match.groups() if group is not None))
