"""Refuses grammars that would keep llguidance busy for too long, before llguidance sees them.

llguidance bounds most of its work itself (``compiler.LIMITS``). It does not bound the work for a few constructs, which
can take hours or very much memory. This module counts these constructs. So the answer does not depend on the speed or
the load of the machine, as it would with a time limit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sized
from decimal import Decimal
from typing import Any

from llm_serving.constraints.grammar import COMPOSED, JSON_SCHEMA, LARK, Grammar

MAX_PROPERTIES = 2048
"""Maximum number of names in ``properties`` and ``required`` of a schema. The work grows with its square: 2048 take a
quarter of a second.
"""
MAX_PATTERN_PROPERTIES = 64
"""Maximum number of names in ``patternProperties`` of a schema. llguidance compares each with all others."""
MAX_MULTIPLES = 100_000
"""Maximum sum of the digits before the zeros of all ``multipleOf`` of a schema. 5 and 0.05 both count 5. The automaton
of a number has about as many states. If the schema combines schemas, one number may have to fit all ``multipleOf``, and
the limit applies to the least common multiple.
"""
MAX_PATTERNS_TOGETHER = 10
"""Maximum number of patterns that one string must match. Each pattern more than doubles the work."""
_SHOWN_NUMBER = 10**18
"""Errors show only numbers below this one. Python refuses to print more than 4300 digits."""
_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples", "deprecated", "$schema", "$comment"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_EMBEDDED = re.compile(r"%json(?:\s|//[^\n]*\n|#[^\n]*\n)*")
"""The start of a JSON schema in a grammar."""
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|#[^\n]*')
"""Strings, regular expressions and comments in a grammar."""


class GrammarError(Exception):
    """A grammar cannot be compiled. The text is the reason, in the client's words."""


def check_work(grammar: Grammar) -> None:
    """Raises GrammarError if compiling ``grammar`` may take too long."""
    if grammar.kind == JSON_SCHEMA:
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError):
            return  # llguidance refuses this text, and states the reason
        _check_schema(schema)
    elif grammar.kind == LARK:
        _check_lark(grammar.text)
    elif grammar.kind == COMPOSED:
        for one in json.loads(grammar.text)["grammars"]:
            _check_lark(one["lark_grammar"])


def _check_lark(text: str) -> None:
    decoder = json.JSONDecoder()
    for found in _EMBEDDED.finditer(text):
        try:
            schema, _ = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        _check_schema(schema)
    rest = _LITERALS.sub("", text)
    number = 1 + rest.count("&") + rest.count("~")
    if number > MAX_PATTERNS_TOGETHER:
        raise GrammarError(
            f"its operators & and ~ combine {number} patterns; the maximum is {MAX_PATTERNS_TOGETHER} in one grammar"
        )


def _check_schema(schema: object) -> None:
    objects = list(_objects(schema))
    names = sum(max(_len(one, "properties", dict), _len(one, "required", list)) for one in objects)
    if names > MAX_PROPERTIES:
        raise GrammarError(f"it has {names} names in 'properties' and 'required'; the maximum is {MAX_PROPERTIES}")
    names = sum(_len(one, "patternProperties", dict) for one in objects)
    if names > MAX_PATTERN_PROPERTIES:
        raise GrammarError(f"it has {names} names in 'patternProperties'; the maximum is {MAX_PATTERN_PROPERTIES}")
    combines = any(map(_combines, objects))
    multiples = {_digits(one["multipleOf"]) for one in objects if _is_number(one.get("multipleOf"))}
    total = math.lcm(*multiples) if combines else sum(multiples)
    if total > MAX_MULTIPLES:
        name = "least common multiple" if combines else "sum"
        shown = total if total < _SHOWN_NUMBER else "very large"
        raise GrammarError(
            f"the {name} of its 'multipleOf', without zeros at the end, is {shown}; the maximum is {MAX_MULTIPLES}"
        )
    patterns = {text for one in objects for text in _patterns(one)}
    if combines and len(patterns) > MAX_PATTERNS_TOGETHER:
        number = _Patterns(schema, len(patterns)).most_together()
        if number > MAX_PATTERNS_TOGETHER:
            raise GrammarError(
                f"it combines {number} keywords 'pattern' and 'format' for one string; the maximum is "
                f"{MAX_PATTERNS_TOGETHER}"
            )


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Yields all JSON objects in ``value``."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield one
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def _len(schema: Mapping[str, Any], key: str, kind: type[Sized]) -> int:
    value = schema.get(key)
    return len(value) if isinstance(value, kind) else 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (isinstance(value, int) or math.isfinite(value)) and value > 0  # isfinite fails for integers above 1.8e308


def _digits(value: float) -> int:
    """Returns the digits of a number without zeros at the end, as an integer. A power of ten gives 1."""
    digits = Decimal(str(value)).as_tuple().digits
    return int("".join(map(str, digits)).rstrip("0") or "0")


def _patterns(schema: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [(key, schema.get(key)) for key in ("pattern", "format")]
    return [(key, value) for key, value in found if isinstance(value, str)]


def _combines(schema: Mapping[str, Any]) -> bool:
    """Returns True if the keywords of ``schema`` make a value fit several schemas."""
    applied = sum(len(schema[key]) if key == "allOf" else 1 for key in _IN_PLACE if isinstance(schema.get(key), list))
    applied += isinstance(schema.get("$ref"), str)
    others = schema.keys() - _ANNOTATIONS - _DEFINITIONS - {*_IN_PLACE, "$ref"}
    return applied > 1 or (applied == 1 and bool(others))


class _Patterns:
    """Counts the patterns that one string of a schema must match. Counts too many rather than too few."""

    def __init__(self, root: object, total: int) -> None:
        """``total`` is the number of different patterns in the schema ``root``."""
        self._root = root
        self._total = total
        self._known: dict[int, int] = {}

    def most_together(self) -> int:
        try:
            return self._count(self._root)
        except RecursionError:
            return self._total

    def _count(self, value: object) -> int:
        if isinstance(value, list):
            return max(map(self._count, value), default=0)
        if not isinstance(value, dict):
            return 0
        if id(value) in self._known:
            return self._known[id(value)]
        self._known[id(value)] = 0  # llguidance refuses a schema that refers to itself and adds further keywords
        applied = {*_IN_PLACE, "$ref"}
        parts = [self._count(one) for key, one in value.items() if key not in applied | _DEFINITIONS]
        number = max([len(_patterns(value)), *parts])
        for key in _IN_PLACE:
            options = value.get(key)
            counts = [self._count(one) for one in options] if isinstance(options, list) else [self._count(options)]
            number += sum(counts) if key == "allOf" else max(counts, default=0)
        number += self._count_reference(value.get("$ref"))
        number = min(number, self._total)
        self._known[id(value)] = number
        return number

    def _count_reference(self, reference: object) -> int:
        if not isinstance(reference, str):
            return self._count(reference)
        if reference != "#" and not reference.startswith("#/"):
            return self._total
        found: object = self._root
        for key in reference[1:].split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return self._total if found is None else self._count(found)
