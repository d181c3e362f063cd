"""Reads the syntax trees of source files."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def syntax_tree(path: Path) -> ast.Module:
    """Returns the syntax tree of a Python file."""
    return parsed(path.read_text("utf-8"))


def parsed(text: str) -> ast.Module:
    """Returns the syntax tree of a Python text.

    CPython 3.11 has one counter of the depth for all trees under construction (its global AST state). A garbage
    collection inside ``ast.parse`` may call a finalizer that parses too, or let another thread run that does. Then a
    call fails with "AST constructor recursion depth mismatch". Therefore no collection runs here.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
