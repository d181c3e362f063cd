"""Imports MindSpore as an agent does. The fork server of ``forked_programs`` imports this module once."""

from __future__ import annotations

import gc
import inspect
import os
from typing import Any

from agent.kernels.library import library_path

# MindSpore reads its log level during the import. After the import, ``agent.backends.runtime`` refuses to set another
# plugin path.
VARIABLES = {"GLOG_v": "3", "MS_OP_PLUGIN_PATH": str(library_path())}
os.environ.update(VARIABLES)

import mindspore  # noqa: E402, F401

_find_lines = inspect.getsourcelines
_lines: dict[Any, tuple[list[str], int]] = {}


def _cached_lines(function: Any) -> tuple[list[str], int]:
    """Returns the source lines of a function, and their place in its file, as ``inspect.getsourcelines`` does.

    MindSpore asks for the lines of ``construct`` for each Cell of a graph. The search takes a sixth of the compilation.
    """
    original = inspect.unwrap(function)
    code = getattr(getattr(original, "__func__", original), "__code__", None)
    if code is None:
        return _find_lines(function)
    if code not in _lines:
        _lines[code] = _find_lines(function)
    lines, place = _lines[code]
    return list(lines), place


inspect.getsourcelines = _cached_lines
gc.freeze()  # the garbage collector of forked programs then skips MindSpore's objects, also during compilation
