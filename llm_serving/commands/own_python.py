"""Restarts a program with the Python of ``.venv`` if the present Python lacks the needed packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

VENV_PYTHON = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python"
SERVING = ("msgspec", "mindspore")
"""A Python with these packages can run the server."""
TOOLS = (*SERVING, "rich", "matplotlib")
"""A Python with these packages can also run the tools."""


def use_own_python(packages: Sequence[str] = SERVING) -> None:
    """Restarts the program with the Python of ``.venv`` if this Python lacks the packages.

    If ``.venv`` also lacks the packages, prints the remedy and exits with code 2.
    """
    prefer_own_python(packages)
    if not _has(packages):
        sys.stderr.write(f"error: {sys.executable} lacks packages that this program needs; run: make setup\n")
        sys.exit(2)


def prefer_own_python(packages: Sequence[str] = SERVING) -> None:
    """Restarts the program with the Python of ``.venv`` if this Python lacks the packages and ``.venv`` exists.

    Otherwise, the program continues with this Python.
    """
    in_own = Path(sys.prefix).resolve() == VENV_PYTHON.parents[1].resolve()
    if not _has(packages) and VENV_PYTHON.is_file() and not in_own:
        os.execv(VENV_PYTHON, [str(VENV_PYTHON), *sys.argv])  # noqa: S606


def _has(packages: Sequence[str]) -> bool:
    return all(find_spec(package) is not None for package in packages)
