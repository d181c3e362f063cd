"""Reads the known errors of ``errors.ini`` and finds them by code or by the words of a log line.

``configparser`` reads the file, because the doctor must run in a Python without installed packages.
"""

from __future__ import annotations

import configparser
import re
from dataclasses import dataclass
from pathlib import Path

from tools.diagnosis import sources

_FILE = Path(__file__).with_name("errors.ini")
_FAMILY = "family "
_SEE_PLOG = "the E-code and the plog lines before the error have details: python tools/doctor.py explain ~/ascend/log"
_SEE_MESSAGE = "the message behind the code has the value and the reason\nthe lines below the code name the call"
_CODE = re.compile(r"E[0-9A-Z][0-9]{4}|[1235][0-9]{5}")
_ALIASES = {
    "kernelsnotbuilterror": "KernelsNotBuilt",
    "memoryplanerror": "memory_refused",
    "configerror": "config_wrong",
    "checkpointerror": "checkpoint_wrong",
    "protocolerror": "slot_torn",
    "agentstarterror": "agent_start_failed",
    "agentlosterror": "agent_lost",
    "queuefullerror": "queue_full",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A known error. ``code`` is a code of CANN, a name, or the common prefix of a family of codes."""

    code: str
    title: str
    cause: str
    advice: tuple[str, ...]
    source: str
    """Address of a public page that explains the error."""
    follows: bool = False
    """True if the error is usually a result of another failure, for example a timeout because another rank failed."""
    pattern: str = ""
    """Regular expression of log lines that describe this error without its code. Empty if there is none."""

    def matches(self, line: str) -> bool:
        """Returns True if the line describes this error in words."""
        return bool(self.pattern) and re.search(self.pattern, line) is not None


def _read(path: Path) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Reads ``errors.ini``. Returns its single errors and its families.

    A family describes all codes with the same prefix.
    """
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.read_string(path.read_text(encoding="utf-8"))
    entries: list[Entry] = []
    families: list[Entry] = []
    for name in parser.sections():
        row = dict(parser[name])
        default = _SEE_MESSAGE if name.startswith(_FAMILY) else _SEE_PLOG
        entry = Entry(
            name.removeprefix(_FAMILY),
            row.pop("title"),
            row.pop("cause").replace("\n", " "),
            tuple(row.pop("advice", default).split("\n")),
            getattr(sources, row["source"], row["source"]),
            row.pop("follows", "") == "yes",
            row.pop("pattern", ""),
        )
        if set(row) != {"source"}:
            raise ValueError(f"{path.name}: {name} has unknown keys: {', '.join(sorted(set(row) - {'source'}))}")
        (families if name.startswith(_FAMILY) else entries).append(entry)
    return tuple(entries), tuple(families)


ENTRIES, FAMILIES = _read(_FILE)
_BY_CODE = {entry.code.lower(): entry for entry in ENTRIES}


def find(code: str) -> Entry | None:
    """Returns the known error with this code or name. If the code is not listed, returns its family or None."""
    word = code.strip().lower()
    entry = _BY_CODE.get(_ALIASES.get(word, word).lower())
    return entry if entry is not None else _of_family(code.strip().upper())


def find_in_words(line: str) -> Entry | None:
    """Returns the first error whose pattern matches the line, or None."""
    return next((entry for entry in ENTRIES if entry.matches(line)), None)


def _of_family(code: str) -> Entry | None:
    if _CODE.fullmatch(code) is None:
        return None
    family = next((each for each in FAMILIES if code.startswith(each.code)), None)
    if family is None:
        return None
    is_internal = code.startswith("E") and code[2] == "9"
    title = f"{family.title}{' without its own code' if is_internal else ''}"
    return Entry(code, title, family.cause, family.advice, family.source, follows=is_internal)
