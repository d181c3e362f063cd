"""Reads typed values from a ``config.json`` or a MindFormers YAML. Each error names file, key and value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from llm_serving.errors import LLMServingError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


def short_repr(value: object) -> str:
    """Returns a shortened ``repr(value)`` for an error text. Deep nesting is safe. None becomes ``null``, as in JSON.
    """
    return "null" if value is None else _short.repr(value)


class TypedFields:
    """Reads typed values from a mapping of a file. If a key is absent or null, the methods return the default.

    ``error`` is the class of raised errors. ``prefix`` is the path of the mapping in the file, for messages.
    """

    def __init__(
        self, source: str, values: Mapping[str, object], error: type[LLMServingError], prefix: str = ""
    ) -> None:
        self.source = source
        self._values = values
        self._error = error
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __bool__(self) -> bool:
        return bool(self._values)

    def keys(self) -> tuple[str, ...]:
        """Returns the keys in the order of the file."""
        return tuple(self._values)

    def with_value(self, key: str, value: object) -> TypedFields:
        """Returns a copy of these fields in which ``key`` has this value."""
        return TypedFields(self.source, {**self._values, key: value}, self._error, self._prefix)

    def value(self, key: str) -> object:
        """Returns the value of a key without any check, or None if the key is absent."""
        return self._values.get(key)

    def fail(self, key: str, problem: str) -> LLMServingError:
        """Returns an error about ``key``, which the caller raises."""
        value = short_repr(self._values[key]) if key in self._values else "(absent)"
        return self._error(f"{self.source}: {self._prefix}{key} = {value}: {problem}")

    def integer(self, key: str, default: int | None, low: int, high: int) -> int:
        """Returns an integer from ``low`` to ``high``. If ``default`` is None, an absent key is an error."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None or isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer from {low} to {high}")
        if not low <= value <= high:
            raise self.fail(key, f"must be from {low} to {high}")
        return value

    def number(self, key: str, default: float | None, low: float, high: float) -> float:
        """Returns a number above ``low`` and at most ``high``. If ``default`` is None, an absent key is an error."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"must be a number above {low:g}, at most {high:g}")
        if not low < value <= high:  # also refuses NaN
            raise self.fail(key, f"must be above {low:g}, at most {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def text(self, key: str, default: str, choices: tuple[str, ...] = ()) -> str:
        value = self._values.get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise self.fail(key, "must be text")
        if choices and value not in choices:
            raise self.fail(key, f"is not supported; only {' or '.join(choices)}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Returns a list of texts as a tuple. It is empty if the key is absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fail(key, "must be a list of text")
        return tuple(value)

    def refuse_nested(self) -> None:
        """Raises an error if a value is a mapping."""
        for key, value in self._values.items():
            if isinstance(value, dict):
                raise self.fail(key, "is not supported; a plain value is expected")

    def mapping(self, key: str) -> TypedFields:
        """Returns the mapping under ``key``. It is empty if the key is absent."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(key, "must be a mapping")
        return TypedFields(self.source, value, self._error, f"{self._prefix}{key}.")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Returns one token id, or a list of them, as a tuple. It is empty if the key is absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.fail(key, "must be a token id or a list of token ids")
            if not 0 <= token_id < vocab_size:
                raise self.fail(key, f"every id must be from 0 to {vocab_size - 1} (vocab_size - 1)")
        return tuple(dict.fromkeys(ids))
