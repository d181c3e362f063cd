"""Starts servers whose processes import the fault module ``fault_module/sitecustomize.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

FAULT_MODULE = Path(__file__).resolve().parent / "fault_module"


@contextmanager
def fault_environment(**variables: str) -> Iterator[None]:
    """Sets environment variables, so that processes started in this context import the fault module.

    ``variables`` configure the module.
    """
    path = os.pathsep.join(filter(None, [str(FAULT_MODULE), os.environ.get("PYTHONPATH", "")]))
    with patch.dict(os.environ, {**variables, "PYTHONPATH": path}):
        yield
