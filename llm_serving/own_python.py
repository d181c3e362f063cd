"""Restarts a program in the virtual environment of ``make setup`` if the present Python lacks packages."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VENV_PYTHON = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"


def use_own_python() -> None:
    """Do as ``prefer_own_python``. If packages are still missing, exit with 2 and a message with the next command."""
    prefer_own_python()
    if not _has_packages():
        sys.stderr.write(f"error: {sys.executable} lacks the packages this needs; run: make setup\n")
        sys.exit(2)


def prefer_own_python() -> None:
    """Restart in ``.venv`` if this Python lacks the packages and ``.venv`` exists. Otherwise do nothing."""
    in_own = Path(sys.prefix).resolve() == VENV_PYTHON.parents[1].resolve()
    if not _has_packages() and VENV_PYTHON.is_file() and not in_own:
        os.execv(VENV_PYTHON, [str(VENV_PYTHON), *sys.argv])  # noqa: S606


def _has_packages() -> bool:
    return find_spec("msgspec") is not None and find_spec("mindspore") is not None
