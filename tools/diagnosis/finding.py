"""Defines the result of a check: ok, a warning or a problem, with advice."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """The severity of a finding. Only a problem prevents serving."""

    OK = 0
    WARNING = 1
    PROBLEM = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check, which is one line of the doctor's report."""

    subject: str
    level: Level
    text: str
    advice: str = ""
    """The remedy, or an empty text."""
    source: str = ""
    """Public documentation about the problem, or an empty text."""


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, Level.OK, text)


def warning(subject: str, text: str, advice: str, source: str = "") -> Finding:
    return Finding(subject, Level.WARNING, text, advice, source)


def problem(subject: str, text: str, advice: str, source: str = "") -> Finding:
    return Finding(subject, Level.PROBLEM, text, advice, source)


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun, which is in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
