"""Starts a program of this folder with the Python environment that ``make setup`` created."""

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)


def run(module: str) -> None:
    """Runs ``main`` of a module and exits with its exit code."""
    from llm_serving.commands.own_python import TOOLS, use_own_python

    use_own_python(TOOLS)
    sys.exit(import_module(module).main())
