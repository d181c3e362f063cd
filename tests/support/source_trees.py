"""Reads the syntax trees of source files."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def syntax_tree(path: Path) -> ast.Module:
    """Returns the syntax tree of a Python file.

    CPython 3.11 has one counter of the depth for all trees under construction (its global AST state). The garbage
    collection may run inside ``ast.parse``, and a finalizer that prints a traceback parses its lines. The outer call
    then fails with "AST constructor recursion depth mismatch". Therefore no collection runs here.
    """
    text = path.read_text("utf-8")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
