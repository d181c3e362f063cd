"""One known error: how it is recognised, what it means, what to do, and where that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the tables. ``code`` is what CANN prints, or a name of ours for an error that is told in words."""

    code: str
    title: str
    cause: str
    advice: tuple[str, ...]
    source: str
    """Public documentation, or the thread where the error was explained."""
    follows: bool = False
    """Mostly the consequence of a failure elsewhere (a rank that waits for another): not to be blamed first."""
    pattern: str = ""
    """A regular expression for a log line that shows this error without its code; empty: by the code alone."""

    def matches(self, line: str) -> bool:
        """Whether the line tells this error in words."""
        return bool(self.pattern) and re.search(self.pattern, line) is not None


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of every code with a prefix, for codes that have no row of their own."""

    prefix: str
    title: str
    cause: str
    advice: tuple[str, ...]
    source: str
