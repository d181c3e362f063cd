"""What a check found: one line, ok, a warning or a problem, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad it is. Only a problem keeps the config from being served."""

    OK = 0
    WARNING = 1
    PROBLEM = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    level: Level
    text: str
    advice: str = ""
    """What to do; empty when nothing is to be done."""
    source: str = ""
    """Where that is written, for what is not this project's."""


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, Level.OK, text)


def warning(subject: str, text: str, advice: str, source: str = "") -> Finding:
    return Finding(subject, Level.WARNING, text, advice, source)


def problem(subject: str, text: str, advice: str, source: str = "") -> Finding:
    return Finding(subject, Level.PROBLEM, text, advice, source)
