"""Draws random JSON schemas of growing difficulty, and validates values against them.

The validator is independent of the library that enforces schemas in the server.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any

LEVELS = 20
_WORDS = (
    *("name", "age", "city", "price", "tags", "color", "size", "owner", "email", "title", "year", "score", "notes"),
    *("status", "items", "address", "phone", "weight", "Höhe", "名前", 'a "b"', "x/y"),
)
_PATTERNS = (r"^[A-Z]{2}-[0-9]{3}$", r"^(red|green|blue)[0-9]?$", r"^[a-z]+@[a-z]+\.(com|org)$", r"^\d{4}-\d{2}$")

Schema = dict[str, Any]


def schema_of_level(rng: random.Random, level: int) -> Schema:
    """Returns a schema of an object. With ``level`` 1 to LEVELS, it has more properties, depth and kinds of limits."""
    schema = _object(rng, level, 1 + level // 7)
    if level >= 14:
        schema["$defs"] = {"node": _node(rng, level)}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        schema["required"].append("tree")
    return schema


def _object(rng: random.Random, level: int, depth: int) -> Schema:
    names = rng.sample(_WORDS, min(1 + rng.randint(level // 5, 1 + level // 3), len(_WORDS)))
    properties = {name: _value(rng, level, depth - 1) for name in names}
    required = [name for name in names if level < 4 or rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _node(rng: random.Random, level: int) -> Schema:
    """Returns a recursive schema: a value, and at most two children that are nodes."""
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    properties = {"value": _value(rng, min(level, 9), 0), "children": children}
    return {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}


def _value(rng: random.Random, level: int, depth: int) -> Schema:
    kinds = ["string", "integer", "boolean"]
    if level >= 3:
        kinds += ["enum", "number"]
    if level >= 5:
        kinds += ["pattern", "null"]
    if level >= 7:
        kinds += ["array", "any of"]
    if level >= 10:
        kinds += ["tuple", "const", "map"]
    if depth > 0:
        kinds += ["object"] * 2
    return _value_of(rng, rng.choice(kinds), level, depth)


def _value_of(rng: random.Random, kind: str, level: int, depth: int) -> Schema:
    low = rng.randint(-20, 50)
    if kind == "object":
        return _object(rng, level, depth)
    if kind == "array":
        return {"type": "array", "items": _value(rng, level, depth - 1), "minItems": rng.randint(0, 2), "maxItems": 3}
    if kind == "tuple":
        items = [_value(rng, level, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    if kind == "any of":
        return {"anyOf": [_value(rng, level, depth - 1), {"type": "null"}]}
    if kind == "map":
        return {"type": "object", "additionalProperties": _value(rng, level, depth - 1), "maxProperties": 3}
    simple: dict[str, Schema] = {
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)},
        "number": {"type": "number", "exclusiveMinimum": low, "maximum": low + 7.25},
        "string": {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(8, 24)},
        "pattern": {"type": "string", "pattern": rng.choice(_PATTERNS)},
        "enum": {"enum": [*rng.sample(_WORDS, 3), low, None]},
        "const": {"const": {"kind": rng.choice(_WORDS), "level": level}},
    }
    return simple.get(kind, {"type": kind})


def problem(value: Any, schema: Any, root: Schema, path: str = "$") -> str | None:
    """Returns why a JSON value does not fit a schema, or None. Raises NotImplementedError for an unknown keyword."""
    if isinstance(schema, bool):
        return None if schema else f"{path}: no value fits"
    for key, expected in schema.items():
        found = _problem_of(key, expected, value, schema, root, path)
        if found is not None:
            return found
    return None


_TYPES: Mapping[str, Any] = {"object": dict, "array": list, "string": str, "null": type(None), "boolean": bool}


def _has_type(value: Any, name: str) -> bool:
    if name in _TYPES:
        return isinstance(value, _TYPES[name])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (name == "number" or float(value).is_integer())


def _limits(value: Any) -> dict[str, float]:
    """Returns the numbers of a value that limits restrict. The key ``Length`` stands for ``minLength`` and
    ``maxLength``, and so on.
    """
    if isinstance(value, str):
        return {"Length": len(value)}
    if isinstance(value, list):
        return {"Items": len(value)}
    if isinstance(value, dict):
        return {"Properties": len(value)}
    return {"imum": value} if _has_type(value, "number") else {}


def _problem_of(key: str, expected: Any, value: Any, schema: Schema, root: Schema, path: str) -> str | None:
    """Returns why a value does not fit one keyword of a schema, or None."""
    wrong = f"{path}: {value!r} does not fit {key} {expected!r}"
    if key in ("$defs", "prefixItems"):
        return None
    if key == "$ref":
        return problem(value, root["$defs"][expected.rpartition("/")[2]], root, path)
    if key == "type":
        return None if _has_type(value, expected) else wrong
    if key == "enum":
        return None if any(type(one) is type(value) and one == value for one in expected) else wrong
    if key == "const":
        return None if value == expected else wrong
    if key == "anyOf":
        return wrong if all(problem(value, one, root, path) for one in expected) else None
    if key == "pattern":
        return wrong if isinstance(value, str) and not re.search(expected, value) else None
    if key in ("properties", "required", "additionalProperties"):
        return _object_problem(key, expected, value, schema, root, path)
    if key == "items":
        first = schema.get("prefixItems", [])
        rules = [*first, *[expected] * max(len(value) - len(first), 0)]
        found = (problem(one, rule, root, f"{path}[]") for one, rule in zip(value, rules, strict=False))
        return next((one for one in found if one), None)
    return _limit_problem(key, expected, value, wrong)


def _limit_problem(key: str, expected: float, value: Any, wrong: str) -> str | None:
    if key == "exclusiveMinimum":
        return None if value > expected else wrong
    if not key.startswith(("min", "max")):
        raise NotImplementedError(key)
    size = _limits(value).get(key[3:], math.nan)
    return wrong if (size < expected if key.startswith("min") else size > expected) else None


def _object_problem(key: str, expected: Any, value: Any, schema: Schema, root: Schema, path: str) -> str | None:
    known = schema.get("properties", {})
    if key == "required":
        missing = [name for name in expected if name not in value]
        return f"{path}: {missing[0]!r} is missing" if missing else None
    rules = expected if key == "properties" else dict.fromkeys(value.keys() - known.keys(), expected)
    found = (problem(value[name], rule, root, f"{path}.{name}") for name, rule in rules.items() if name in value)
    return next((one for one in found if one), None)
