"""Reads the files of ``text/``. A file consists of sections. A section begins with a line ``[name]``. ``#`` begins a
comment.
"""

import random
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "text"


@cache
def sections(name: str) -> dict[str, tuple[str, ...]]:
    """Returns the lines of each section of ``text/name.txt``."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            current.append(line)
    return {section: tuple(lines) for section, lines in found.items()}


def pick(rng: random.Random, section: str, **slots: str) -> str:
    """Returns a random line of a section of ``text/wordings.txt`` with its slots filled in."""
    return rng.choice(sections("wordings")[section]).format(**slots)


def items(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the items of a list that are separated by commas and line ends."""
    return tuple(item for line in lines for item in line.split(", "))


def pairs(lines: tuple[str, ...]) -> dict[str, str]:
    """Returns the lines ``key: value`` as a dictionary."""
    return dict(line.split(": ", 1) for line in lines)
