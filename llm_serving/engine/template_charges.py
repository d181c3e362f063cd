"""Computes the charge of a template's operation before it runs: how many characters the operation may make or compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from typing import Any

from llm_serving.engine.template_budget import (
    CHARS_PER_STEP,
    ITEM_CHARS,
    MAX_BITS,
    MAX_DEPTH,
    MAX_WIDTH,
    Budget,
    BudgetError,
)

Charge = Callable[..., int]
"""A function ``charge(budget, value, *arguments)`` that returns the charge of an operation, in characters."""


def methods_of(owner: object) -> dict[str, Callable[..., int]] | None:
    """Returns the methods that a template may call on an object, by name.

    Returns None if the object's type is not built in.
    """
    return next((methods for kind, methods in _METHODS if isinstance(owner, kind)), None)


OBJECT_CHARS = 32
"""Charge in characters for an object, such as a dictionary or a namespace, in addition to the charge for its items."""


def length(value: Sized) -> int:
    return len(value) if isinstance(value, str) else ITEM_CHARS * len(value)


def _width(value: object) -> int:
    """Returns the absolute value of a width. Raises BudgetError unless it is an integer of at most ``MAX_WIDTH``."""
    if not isinstance(value, int) or abs(value) > MAX_WIDTH:
        raise BudgetError(f"a width or count is not a number of at most {MAX_WIDTH}")
    return abs(value)


def product_size(operator: str, left: Any, right: Any) -> int:
    """Returns the charge of a product or power: the characters of a repeated text or list, or 0 for a number.

    Raises BudgetError if the result is a number of more than ``MAX_BITS`` bits.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise BudgetError(f"a number of more than {MAX_BITS} bits")
        return 0
    value, times = (left, right) if isinstance(right, int) else (right, left)
    return length(value) * max(times, 0) if isinstance(value, Sized) and isinstance(times, int) else 0


def percent_size(budget: Budget, pattern: str, values: Any) -> int:
    """Returns the maximum length of ``pattern % values``.

    Raises BudgetError if a field of the pattern is wider than 99 characters.
    """
    if re.search(r"%[^A-Za-z%]*(\d\d\d|\*)", pattern):
        raise BudgetError("a format has a field of more than 99 characters")
    return len(pattern) + pattern.count("%") * (100 + budget.size(values))


def _format_size(budget: Budget, pattern: str, *args: Any, **kwargs: Any) -> int:
    """Returns the maximum length of ``pattern.format(...)``.

    Raises BudgetError for a field of more than 99 characters, or a nested field.
    """
    if re.search(r"\d\d\d|\{[^{}]*\{", pattern):
        raise BudgetError("a format has a field of more than 99 characters or a nested field")
    values = sum(map(budget.size, args)) + sum(map(budget.size, kwargs.values()))
    return len(pattern) + pattern.count("{") * (100 + values)


def _size(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    return budget.size(value)


def all_sizes(budget: Budget, *args: Any, **kwargs: Any) -> int:
    return sum(map(budget.size, args)) + sum(map(budget.size, kwargs.values()))


def _several_sizes(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """Returns the charge of an operation that makes many objects, or that compares each item of ``value`` several
    times.
    """
    return 16 * all_sizes(budget, value, *args, **kwargs)


def _nothing(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    return 0


def _replace_size(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> int:
    text, old, new = (part if isinstance(part, str) else str(part) for part in (value, old, new))
    found = text.count(old) if old else len(text) + 1
    return len(text) + found * max(len(new) - len(old), 0)


def _join_size(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> int:
    """Returns the charge of the filter ``join``: the characters of all items, plus one separator ``d`` per item."""
    number = len(value) if isinstance(value, Sized) else 0
    return budget.size(value) + number * budget.size(d)


def _str_join_size(budget: Budget, separator: str, values: Any) -> int:
    return _join_size(budget, values, separator)


def _reverse_search_size(budget: Budget, text: Any, part: Any, *args: Any) -> int:
    """Returns the charge of a search from the end of ``text``.

    Each character of ``text`` may be compared with all of ``part``.
    """
    return budget.size(text) * (1 + (len(part) if isinstance(part, str) else 0) // 16)


def _reverse_split_size(budget: Budget, text: Any, sep: Any = None, maxsplit: Any = -1) -> int:
    return 16 * _reverse_search_size(budget, text, sep)


def _key_size(budget: Budget, value: Any, key: Any, *args: Any) -> int:
    """Returns the charge of a dictionary look-up: the size of ``key`` with all values in it, because all are hashed."""
    return budget.size(key)


def _strip_size(budget: Budget, text: Any, chars: Any = None) -> int:
    """Returns the charge of stripping ``chars`` from the ends of ``text``.

    Each character of ``text`` may be compared with all of ``chars``.
    """
    return budget.size(text) * (1 + (len(chars) if isinstance(chars, str) else 0) // 16)


def _center_size(budget: Budget, text: Any, width: Any = 80, fill: Any = " ") -> int:
    return budget.size(text) + _width(width)


def _expandtabs_size(budget: Budget, text: str, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t") * _width(tabsize)


def _indent_size(budget: Budget, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    number = text.count("\n") + 1 if isinstance(text, str) else 1
    return budget.size(text) + number * (len(width) if isinstance(width, str) else _width(width))


def _columns_size(budget: Budget, value: Any, number: Any, fill_with: Any = None) -> int:
    return budget.size(value) + ITEM_CHARS * _width(number)


def json_size(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """Returns the charge of ``tojson``.

    An escape can turn one character into six, and each item can get an indented line of its own.
    """
    options = [*args, *kwargs.values()]
    spaces = sum(_width(one) if isinstance(one, int) else budget.size(one) for one in options if one is not None)
    if spaces > CHARS_PER_STEP:
        raise BudgetError("an indentation or a separator of tojson is too long")
    size = budget.size(value)
    return 6 * size + (size // ITEM_CHARS + 1) * spaces * (MAX_DEPTH if spaces > 1 else 1)


def _round_size(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> int:
    if not isinstance(precision, int) or abs(precision) > MAX_DEPTH:
        raise BudgetError(f"a precision is not a number of at most {MAX_DEPTH}")
    return budget.size(value)


def _sum_size(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise BudgetError("a sum begins with a number")
    return 4 * budget.size(value)


def _percent_filter_size(budget: Budget, pattern: Any, *args: Any, **kwargs: Any) -> int:
    return percent_size(budget, str(pattern), [args, kwargs])


FILTERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("length", "count", "first", "last", "default", "d", "safe", "abs", "attr"), _nothing),
    **dict.fromkeys(
        ("upper", "lower", "capitalize", "title", "string", "list", "reverse", "items", "map", "select", "reject",
         "selectattr", "rejectattr", "truncate", "int", "float"), _size,
    ),
    **dict.fromkeys(
        ("sort", "dictsort", "unique", "min", "max", "groupby", "wordcount", "escape", "e", "forceescape"),
        _several_sizes,
    ),
    "trim": _strip_size, "replace": _replace_size, "join": _join_size, "center": _center_size,
    "indent": _indent_size, "batch": _columns_size, "slice": _columns_size, "round": _round_size, "sum": _sum_size,
    "format": _percent_filter_size,
}  # fmt: skip
"""The available filters, each with a function that returns its charge in characters. A charge must not be
lower than the real cost of the filter.
"""

_STR_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
         "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower",
         "partition", "removeprefix", "removesuffix", "startswith", "swapcase",
         "title", "upper"), _size,
    ),
    **dict.fromkeys(("split", "splitlines"), _several_sizes),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _reverse_search_size), "rsplit": _reverse_split_size,
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip_size),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _center_size),
    "replace": _replace_size, "join": _str_join_size, "expandtabs": _expandtabs_size, "format": _format_size,
}  # fmt: skip
_LIST_METHODS = dict.fromkeys(("index", "count"), all_sizes)
_METHODS: tuple[tuple[type, dict[str, Callable[..., int]]], ...] = (
    (str, _STR_METHODS),
    (list, {**_LIST_METHODS, "copy": _size}),
    (tuple, _LIST_METHODS),
    (dict, {**dict.fromkeys(("items", "keys", "values"), _nothing), "get": _key_size, "copy": _size}),
    (int, {}),
    (float, {}),
    (range, {}),
)
"""The available methods of built-in types, each with its charge in characters."""

COMPARING_TESTS = ("in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan",
                    ">", "ge", ">=", "sameas")  # fmt: skip
