"""Counts the steps and the characters that one rendering of a chat template may still take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sized
from typing import Any

import jinja2.utils

MAX_BITS = 256
"""Maximum size of an integer that a template may compute with."""
MAX_DEPTH = 64
"""Maximum nesting of a value that a template compares or writes."""
MAX_WIDTH = 10_000
"""Maximum value of widths, numbers of columns and similar arguments that a template passes to a filter or method."""
CHARS_PER_STEP = 256
"""Number of characters or bytes whose processing counts as one step."""
ITEM_CHARS = 8
"""Charge in characters for each item of a container, in addition to the charge for the item's text."""


class BudgetError(Exception):
    """A template has used up its budget, or its next operation would exceed it."""


class Budget:
    """Counts the operations and the characters of text that are left to one rendering of a chat template."""

    __slots__ = ("chars", "steps")

    def __init__(self, steps: int, chars: int) -> None:
        self.steps = steps
        self.chars = chars

    def take(self, chars: int = 0, steps: int = 1) -> None:
        """Uses up ``chars`` characters and ``steps`` steps of the budget. Raises BudgetError if fewer are left."""
        self.chars -= chars
        self.steps -= steps + chars // CHARS_PER_STEP
        if self.chars < 0 or self.steps < 0:
            raise BudgetError("it takes too many steps or makes too much text")

    def size(self, value: object) -> int:
        """Returns the number of characters in a value, including all values that it contains.

        Visiting the values uses up steps of the budget.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise BudgetError(f"a number of more than {MAX_BITS} bits")
            return MAX_BITS // 3
        total = 0
        level: list[object] = [value]
        for _ in range(MAX_DEPTH):
            inner: list[object] = []
            for one in level:
                total += len(one) if isinstance(one, str) else ITEM_CHARS
                if isinstance(one, dict):
                    inner += one
                    inner += one.values()
                elif isinstance(one, range):
                    total += ITEM_CHARS * len(one)
                elif isinstance(one, jinja2.utils.Namespace):
                    inner += object.__getattribute__(one, "_Namespace__attrs").items()
                elif isinstance(one, Collection) and not isinstance(one, str):
                    inner += one
                self.take(0, 1 if inner else 0)
                if total + len(inner) > self.chars:
                    raise BudgetError("a value has too many parts")
            if not inner:
                return total
            level = inner
        raise BudgetError(f"a value is nested deeper than {MAX_DEPTH} levels")

    def each(self, values: Any) -> Any:
        """Returns ``values`` for use in a loop, and charges one step for each item.

        A collection with a known size is charged immediately. An iterator is charged item by item.
        """
        if isinstance(values, Sized):
            self.take(0, 1 + len(values))
            return values
        return self._counted(iter(values))

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.take()
            yield value
