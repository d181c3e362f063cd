"""Implements ``doctor.py explain``, which explains error codes and the errors in logs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.diagnosis.catalogue import Entry, find, find_in_words
from tools.diagnosis.log_lines import Sighting
from tools.diagnosis.log_reader import LogFile, read_logs
from tools.diagnosis.timeline import FirstFailure, first_failure, in_order, incidents, whose

WIDTH = 110
"""Width of the text, in characters."""
QUOTED_CHARS = 200
"""Maximum length of a quoted line of a log."""
SHOWN_INCIDENTS = 3
"""Maximum number of incidents that are explained, the latest ones."""


class UnknownThingError(Exception):
    """Raised if an argument of ``explain`` is neither a known code nor a file."""


def explain(thing: str) -> tuple[str, dict[str, Any], bool]:
    """Explains an error code or logs. Returns the explanation as text and as JSON, and whether a known error was found.

    ``thing`` is a file, a folder, ``-`` (standard input), a code, or a log line. Raises UnknownThingError, or OSError
    if a file cannot be read.
    """
    if thing == "-":
        return explain_logs([LogFile("standard input").read(sys.stdin)])
    path = Path(thing)
    if thing and _exists(path):
        return explain_logs(read_logs(path))
    entry = find(thing) or find_in_words(thing)
    if entry is not None:
        return describe(entry), {"codes": [_as_json(entry)]}, True
    raise UnknownThingError(
        f"{thing}: neither a file nor a known code. Give a code such as EI0006 or step_timeout, a log, a folder "
        "of logs, or - (standard input)"
    )


def explain_logs(files: Sequence[LogFile]) -> tuple[str, dict[str, Any], bool]:
    """Explains the errors in logs, and names the rank that failed first."""
    sightings = in_order(files)
    lines = sum(file.lines for file in files)
    read = f"{len(files)} file{'' if len(files) == 1 else 's'}, {lines} lines"
    if not sightings:
        return f"{read}: no known error", {"files": len(files), "lines": lines, "errors": []}, False
    groups: list[list[Sighting]] = []
    for code in dict.fromkeys(each.entry.code for each in sightings):
        groups.append([each for each in sightings if each.entry.code == code])
    failures = [first_failure(incident) for incident in incidents(sightings)]
    parts = [f"{read}; errors: {len(sightings)}, of {len(groups)} kinds"]
    if len(failures) > SHOWN_INCIDENTS:
        parts.append(f"the last {SHOWN_INCIDENTS} of {len(failures)} incidents, the latest first:")
    parts += [_verdict(failure) for failure in reversed(failures[-SHOWN_INCIDENTS:])]
    causes_first = sorted(groups, key=lambda group: group[0].entry.follows)
    parts += [f"{_counts(group)}\n{describe(group[0].entry)}" for group in causes_first]
    machine = {
        "files": len(files),
        "lines": lines,
        "incidents": [{"who": each.who, "why": each.why, **_place(each.sighting)} for each in failures],
        "errors": [{**_as_json(group[0].entry), "count": len(group), **_place(group[0])} for group in groups],
    }
    return "\n\n".join(parts), machine, True


def describe(entry: Entry) -> str:
    """Returns an error as text: title, cause, advice, source."""
    kind = "  (usually a result: look for an earlier failure)" if entry.follows else ""
    lines = [f"{entry.code}  {entry.title}{kind}", *_wrapped("cause", entry.cause)]
    for advice in entry.advice:
        lines += _wrapped("do", advice)
    return "\n".join([*lines, f"    see    {entry.source}"])


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"    {label:<7}", subsequent_indent=" " * 11)


def _verdict(first: FirstFailure) -> str:
    sighting = first.sighting
    when = f" at {sighting.time}" if sighting.time else ""
    text = sighting.text if len(sighting.text) <= QUOTED_CHARS else f"{sighting.text[:QUOTED_CHARS]}..."
    return f"failed first: {first.who}{when}\n    {first.why}\n    {sighting.file}:{sighting.line_number}: {text}"


def _counts(group: Sequence[Sighting]) -> str:
    first = group[0]
    ranks = sorted({each.rank for each in group if each.rank is not None})
    who = f", of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    when = f", first at {first.time}" if first.time else ""
    return f"-- {len(group)} x{when}, by {whose(first)}{who}"


def _place(sighting: Sighting) -> dict[str, Any]:
    return {
        "code": sighting.entry.code,
        "file": sighting.file,
        "line": sighting.line_number,
        "time": sighting.time.isoformat() if sighting.time else None,
        "rank": sighting.rank,
        "device": sighting.device,
        "process": sighting.pid,
    }


def _as_json(entry: Entry) -> dict[str, Any]:
    shown = {key: getattr(entry, key) for key in ("code", "title", "cause", "advice", "source")}
    return {**shown, "consequence": entry.follows}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
