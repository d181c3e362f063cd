"""Finds the JSON types of a tool's parameters in its schema.

Some formats of tool calls write values without quotes. For these formats, the parser needs the type to distinguish a
text from a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STRING = "string"
MAX_REFERENCES = 8
"""Maximum number of consecutive references (``$ref``) that are followed."""
MAX_OPTIONS = 64
"""Maximum number of options (``anyOf``) of a parameter whose types are read. It bounds the work for large schemas."""


def resolve(schema: object, root: Mapping[str, Any]) -> object:
    """Returns the schema to which a local reference (``$ref``) leads. Returns ``schema`` itself if it is not a
    reference, and None after too many references. ``root`` is the whole schema.
    """
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return schema
        parts = schema.get("allOf")
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            found: object = root
            for key in reference[2:].split("/"):
                found = found.get(key) if isinstance(found, Mapping) else None
            schema = found
        elif isinstance(parts, list) and len(parts) == 1:
            schema = parts[0]
        else:
            return schema
    return None


def json_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a schema allows, or an empty set if the schema states no types.

    ``root`` is the whole schema, in which references are looked up. If the schema has more than ``MAX_OPTIONS``
    options, also inside of each other, the result is empty.
    """
    found: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending:
        one = resolve(pending.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        options = _options(one)
        types = frozenset[str]() if options else _own_types(one)
        if len(seen) + len(options) > MAX_OPTIONS or not (options or types):
            return frozenset()
        found |= types
        pending += options
    return frozenset(found)


def _options(schema: object) -> list[object]:
    """Returns the schemas in ``anyOf`` or ``oneOf``, if the schema itself states no type. Otherwise returns []."""
    if not isinstance(schema, Mapping) or isinstance(schema.get("type"), str | list):
        return []
    return next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), [])


def _own_types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return frozenset(map(_type_of, values)) if isinstance(values, list) else frozenset()


def parameter_types(schema: Mapping[str, Any] | None) -> dict[str, frozenset[str]]:
    """Returns the JSON types of each parameter in the schema of a tool's arguments."""
    root = schema or {}
    properties = root.get("properties")
    return {name: json_types(one, root) for name, one in properties.items()} if isinstance(properties, Mapping) else {}


def is_text(types: frozenset[str]) -> bool:
    """Returns True if the value of a parameter is read as text, because its only type is string or its type is unknown.
    """
    return not types or types == {STRING}


def as_json(value: str, types: frozenset[str]) -> str:
    """Returns the value of a parameter as JSON text.

    If the value is JSON of an allowed type, it is returned unchanged. Otherwise it becomes a JSON string.
    """
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    kind = _type_of(parsed)
    allowed = kind in types or (kind == "integer" and "number" in types) or STRING not in types
    return value.strip() if allowed and kind != STRING else json.dumps(value, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: STRING, list: "array", dict: "object"}
    return kinds[type(value)]
