"""Imports MindSpore as an agent does. The fork server of ``forked_programs`` imports this module once."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

from agent.kernels.library import library_path

# MindSpore reads its log level during the import. After the import, ``agent.backends.runtime`` refuses to set another
# plugin path.
VARIABLES = {"GLOG_v": "3", "MS_OP_PLUGIN_PATH": str(library_path())}
os.environ.update(VARIABLES)

import mindspore  # noqa: E402, F401
from mindspore.graph._parse.parser import Parser  # noqa: E402

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

_find_location = Parser.get_location
_locations: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def _cached_location(parser: Any, node: Any) -> list[Any]:
    """Returns the place of a syntax node in its file, as ``Parser.get_location`` does.

    MindSpore asks for the place of each node once for each Cell of a graph. The trees of equal functions are the same.
    """
    nodes = tuple(map(id, node)) if isinstance(node, list | tuple) else id(node)
    key = (nodes, parser.filename, parser.line_offset, parser.col_offset)
    if key not in _locations:
        _locations[key] = (node, _find_location(parser, node))  # the reference keeps the node's id from other nodes
    return list(_locations[key][1])


Parser.get_location = _cached_location


def parse_early(functions: Iterable[Callable[..., Any]]) -> None:
    """Fills MindSpore's cache of syntax trees, so that the compilation of a graph need not parse these functions.

    MindSpore marks the tokens of each tree, which takes some milliseconds for each function.
    """
    for function in functions:
        Parser(function).parse()


gc.freeze()  # the garbage collector of forked programs then skips MindSpore's objects, also during compilation
