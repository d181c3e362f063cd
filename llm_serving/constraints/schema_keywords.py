"""Replaces keywords of JSON Schema that llguidance refuses, if the schema has the same meaning without them.

Most of these keywords have no effect where they stand, such as ``then`` without ``if``, or ``uniqueItems: false``. Code
generators write them often. A keyword that cannot be replaced stays, so that llguidance names it in its error. The
meanings of keywords are those of JSON Schema 2020-12.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef")
"""Keywords that apply further schemas to the value that their own schema describes. The meaning of
``unevaluatedProperties`` depends on these schemas.
"""
_ONE_SCHEMA = (
    *("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_MAX_COPIED_CHARS = 16384
"""Maximum length of the copies that a rewritten schema has of one value."""
_ALLOWS_ALL: tuple[object, ...] = (True, {})
_DYNAMIC = "$dynamicAnchor"

Schema = dict[str, Any]


def rewritten_text(text: str) -> str:
    """Applies ``rewritten`` to the JSON text of a schema. Returns ``text`` if no keyword changes, or if ``text`` is not
    JSON.
    """
    try:
        schema = json.loads(text)
        before, after = (json.dumps(one, allow_nan=False) for one in (schema, rewritten(schema)))
        return text if before == after else after
    except (ValueError, RecursionError):
        return text


def rewritten(schema: object) -> Any:
    """Returns an equivalent schema with fewer keywords. ``schema`` is parsed JSON, and is not modified.

    Raises RecursionError if the schema is nested too deeply.
    """
    rules = _RULES if mentions(schema, "$dynamicRef") else (*_RULES, _plain_anchors)
    return {} if schema is True else _rewritten(schema, rules)


def _rewritten(schema: object, rules: tuple[Callable[[Schema], None], ...]) -> Any:
    if not isinstance(schema, dict):
        return schema
    new: Schema = {}
    for key, value in schema.items():
        if key in _ONE_SCHEMA:
            value = _rewritten(value, rules)
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            value = [_rewritten(one, rules) for one in value]
        elif key in _SCHEMA_MAPS and isinstance(value, dict):
            value = {name: _rewritten(one, rules) for name, one in value.items()}
        new[key] = value
    for rule in rules:
        rule(new)
    return new


def mentions(value: object, key: str) -> bool:
    """Returns True if an object in ``value``, which is parsed JSON, has the key ``key``."""
    if isinstance(value, dict):
        return key in value or any(mentions(one, key) for one in value.values())
    return isinstance(value, list) and any(mentions(one, key) for one in value)


def _whole_counts(schema: Schema) -> None:
    """Replaces the value of keywords like ``minItems`` by an integer if it is a whole number such as 2.0."""
    for key in _COUNTS:
        value = schema.get(key)
        if isinstance(value, float) and value.is_integer():
            schema[key] = int(value)


def _unevaluated_properties(schema: Schema) -> None:
    """Replaces ``unevaluatedProperties`` by ``additionalProperties`` if no other keyword applies a schema to the same
    value.

    The two keywords then mean the same.
    """
    key = "unevaluatedProperties"
    if key in schema and schema[key] in _ALLOWS_ALL:
        del schema[key]
    elif key in schema and not schema.keys() & set(_IN_PLACE):
        schema.setdefault("additionalProperties", schema.pop(key))


def _unevaluated_items(schema: Schema) -> None:
    """Replaces ``unevaluatedItems`` by ``items`` if no other keyword applies a schema to the same value or its items.
    """
    key = "unevaluatedItems"
    if key in schema and schema[key] in _ALLOWS_ALL:
        del schema[key]
    elif key in schema and not schema.keys() & {*_IN_PLACE, "contains"} and not isinstance(schema.get("items"), list):
        schema.setdefault("items", schema.pop(key))


def _conditions(schema: Schema) -> None:
    """Removes an ``if`` without ``then`` and ``else``, and ``then`` and ``else`` without an ``if``."""
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif all(schema.get(key, True) in _ALLOWS_ALL for key in ("then", "else")):
        for key in ("if", "then", "else"):
            schema.pop(key, None)


def _contains(schema: Schema) -> None:
    """Removes ``contains`` if no item must match it, and ``minContains`` and ``maxContains`` without ``contains``."""
    if "contains" in schema and schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"]
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)


def _property_names(schema: Schema) -> None:
    """Removes ``propertyNames`` that allow all names. Replaces a list or a pattern of names by ``properties`` or
    ``patternProperties``. Keeps a list if many names would have a copy of a long schema.
    """
    names = schema.get("propertyNames")
    if names in (*_ALLOWS_ALL, {"type": "string"}):
        del schema["propertyNames"]
        return
    if not isinstance(names, Mapping) or schema.keys() & {"properties", "patternProperties"}:
        return
    others = names.keys() - {"type"}
    value = schema.get("additionalProperties", True)
    if names.get("type", "string") != "string" or _IN_PLACE_OR_UNEVALUATED & schema.keys():
        return
    enum = names.get("enum")
    if others == {"enum"} and isinstance(enum, list) and all(isinstance(one, str) for one in enum):
        if value not in _ALLOWS_ALL and len(enum) * len(json.dumps(value)) > _MAX_COPIED_CHARS:
            return
        schema["properties"] = dict.fromkeys(enum, value)
    elif others == {"pattern"} and isinstance(names["pattern"], str):
        schema["patternProperties"] = {names["pattern"]: value}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


_IN_PLACE_OR_UNEVALUATED = {*_IN_PLACE, "unevaluatedProperties"}


def _no_effect(schema: Schema) -> None:
    """Removes keywords whose value allows everything, for example ``uniqueItems: false``."""
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("not") is False:
        del schema["not"]
    for key in ("dependentRequired", "dependentSchemas"):
        value = schema.get(key)
        if isinstance(value, dict) and all(one in ([], *_ALLOWS_ALL) for one in value.values()):
            del schema[key]


def _plain_anchors(schema: Schema) -> None:
    """Replaces ``$dynamicAnchor`` by ``$anchor``. Both mean the same in a schema without ``$dynamicRef``."""
    if isinstance(schema.get(_DYNAMIC), str) and "$anchor" not in schema:
        schema["$anchor"] = schema.pop(_DYNAMIC)


_RULES = (
    _whole_counts,
    _unevaluated_properties,
    _unevaluated_items,
    _conditions,
    _contains,
    _property_names,
    _no_effect,
)
