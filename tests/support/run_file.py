"""Runs a program file as Python does, without its warnings: ``python -m support.run_file FILE [arguments]``."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
