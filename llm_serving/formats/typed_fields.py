"""Typed reads from a foreign mapping (a ``config.json``, a MindFormers YAML): each error names file, key, value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from llm_serving.errors import LLMServingError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


def short_repr(value: object) -> str:
    """``repr`` cut to a line, safe for hostile nesting; None as YAML and JSON write it."""
    return "null" if value is None else _short.repr(value)


class TypedFields:
    """A mapping with its file name and the key it sits under. A key that is absent or null yields the default."""

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
        """The keys, in the file's order."""
        return tuple(self._values)

    def value(self, key: str) -> object:
        """Whatever is there; None when absent."""
        return self._values.get(key)

    def fail(self, key: str, problem: str) -> LLMServingError:
        """The error to raise about ``key``."""
        value = short_repr(self._values[key]) if key in self._values else "(absent)"
        return self._error(f"{self.source}: {self._prefix}{key} = {value}: {problem}")

    def integer(self, key: str, default: int | None, low: int, high: int) -> int:
        """An int in [low, high]; ``default`` None makes the key compulsory."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None or isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer from {low} to {high}")
        if not low <= value <= high:
            raise self.fail(key, f"must be from {low} to {high}")
        return value

    def number(self, key: str, default: float | None, low: float, high: float) -> float:
        """A finite number in (low, high]."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"must be a number above {low:g}, at most {high:g}")
        if not low < value <= high:  # false for NaN too
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
        """A list of text; empty when absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fail(key, "must be a list of text")
        return tuple(value)

    def refuse_nested(self) -> None:
        """Raise when a value is itself a mapping."""
        for key, value in self._values.items():
            if isinstance(value, dict):
                raise self.fail(key, "is not supported; a plain value is expected")

    def mapping(self, key: str) -> TypedFields:
        """The mapping under ``key``; empty when absent."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(key, "must be a mapping")
        return TypedFields(self.source, value, self._error, f"{self._prefix}{key}.")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, each below ``vocab_size``; empty when absent."""
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
