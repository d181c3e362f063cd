"""Lets the programs in the repository be started with any Python: they go on in the one ``make setup`` made."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VENV_PYTHON = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"


def use_own_python() -> None:
    """Start again in ``.venv`` when this Python lacks the packages and ``.venv`` is there; else do nothing.

    Exits with 2 and says what to do when there is neither.
    """
    if find_spec("msgspec") is not None and find_spec("mindspore") is not None:
        return
    if VENV_PYTHON.is_file() and Path(sys.prefix).resolve() != VENV_PYTHON.parents[1].resolve():
        os.execv(VENV_PYTHON, [str(VENV_PYTHON), *sys.argv])  # noqa: S606
    sys.stderr.write(f"error: {sys.executable} lacks the packages this needs; run: make setup\n")
    sys.exit(2)
