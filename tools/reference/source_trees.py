"""Reads the syntax trees of source files."""

from __future__ import annotations

import ast
import gc
from functools import lru_cache
from pathlib import Path


def syntax_tree(path: Path) -> ast.Module:
    """Returns the syntax tree of a Python file."""
    return parsed(path.read_text("utf-8"))


@lru_cache(maxsize=4)
def parsed(text: str) -> ast.Module:
    """Returns the syntax tree of a Python text. The caller must not change the tree.

    The cache holds the last texts, because several functions read the same file in succession.

    The garbage collector is off meanwhile. CPython 3.11 counts the recursion depth of all running ``ast.parse`` calls
    in one global counter. A collection inside a call can start a second call, in a finalizer or in another thread. Then
    a call fails with "AST constructor recursion depth mismatch".
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
