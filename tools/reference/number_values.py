"""Computes the values of constants that are plain numbers, and writes them in a readable form."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

NAME = re.compile(r"_?[A-Z][A-Z0-9_]+")
"""The names of constants."""
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: lambda left, right: int(left) << int(right),
    ast.RShift: lambda left, right: int(left) >> int(right),
}
_BYTE_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIME_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TIME_NAMES = re.compile(r"(?i).*(?:_(S|MS|US|NS)|_(MILLI|MICRO|NANO)?SECONDS)")
_TIME_TEXT = re.compile(r"(?:.* in |.*[Nn]umber of |.*[Mm]aximum |)(milli)?(?:S|s)econds\b.*", re.DOTALL)
_BYTE_TEXT = re.compile(r"(?:.* in |.*[Nn]umber of |.*[Mm]aximum |)(?:B|b)ytes\b.*", re.DOTALL)
_OTHER_UNITS = {
    "_CHARS": "characters", "_CHARACTERS": "characters", "_TOKENS": "tokens", "_PIXELS": "pixels", "_LINES": "lines",
    "_HOURS": "hours", "_MINUTES": "minutes", "_DAYS": "days", "_PERCENT": "%",
}  # fmt: skip
_LARGE = 10_000
"""From this number on, a number without a unit is shown with separators."""


def number(node: ast.expr, known: Mapping[str, float]) -> float | None:
    """Returns the value of an expression of numbers and ``known`` names, or None for another expression."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) in (int, float) else None
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = number(node.operand, known)
        return -value if value is not None and isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right, operation = number(node.left, known), number(node.right, known), _OPERATIONS.get(type(node.op))
        return None if left is None or right is None or operation is None else operation(left, right)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("float", "int") and len(node.args) == 1:
        argument = node.args[0]
        return float(argument.value) if isinstance(argument, ast.Constant) else None
    return None


def readable(name: str, source: str, value: float, text: str = "") -> str:
    """Returns the readable form of a constant, such as "512 KiB" or "30 s"; empty if the source is readable already.

    The unit is the ending of the name, or else the unit that the text names.
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
    if not math.isfinite(value):
        return ""
    if words.endswith("BYTES"):
        return _with_unit(value, _BYTE_UNITS) or f"{_digits(value)} bytes"
    if unit := _time_unit(words, text):
        return _time(value, unit)
    for ending, other in _OTHER_UNITS.items():
        if words.endswith(ending):
            return f"{_digits(value)} {other}"
    if _BYTE_TEXT.match(text):
        return _with_unit(value, _BYTE_UNITS) or f"{_digits(value)} bytes"
    is_plain = re.fullmatch(r"-?[\d.]+(?:e-?\d+)?", source) is not None
    return _digits(value) if not is_plain or value >= _LARGE else ""


def _time_unit(words: str, text: str) -> str:
    """Returns the unit of a time: s, ms, us or ns; empty for another number."""
    if found := _TIME_NAMES.fullmatch(words):
        return (found[1] or f"{(found[2] or '').replace('MICRO', 'U')[:1]}s").lower()
    found = _TIME_TEXT.match(text)
    return f"{(found[1] or '')[:1]}s" if found else ""


def _time(value: float, unit: str) -> str:
    """Returns a time in its unit, and in days, hours, minutes or milliseconds if that is shorter."""
    seconds = value * _TIMES[unit]
    longer = _with_unit(seconds, _TIME_UNITS) if seconds >= 120.0 else ""
    if 0.0 < seconds < 1.0 and unit != "ms":
        longer = f"{seconds * 1000.0:g} ms"
    return f"{_digits(value)} {unit} = {longer}" if longer else f"{_digits(value)} {unit}"


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Returns a value in the largest unit of which it is a multiple, or an empty text if there is none."""
    for size, unit in units:
        if abs(value) >= size and value % size == 0:
            number_of = _digits(value / size)
            return f"{number_of} {unit.removesuffix('s') if number_of == '1' else unit}"
    return ""


def _digits(value: float) -> str:
    """Returns a number without a useless fraction, and with separators if it is large."""
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e15):
        return f"{value:g}"
    return f"{int(value):,}" if abs(value) >= _LARGE else str(int(value))
