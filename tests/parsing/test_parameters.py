"""Tests how the JSON types of a tool's parameters are found in its schema."""

from __future__ import annotations

from typing import Any

import pytest

from llm_serving.parsing.parameters import MAX_OPTIONS, json_types

REFERENCE = {"$ref": "#/$defs/a"}


def definitions(value: object, **more: object) -> dict[str, Any]:
    return {"$defs": {"a": value, **more}}


@pytest.mark.parametrize(
    ("schema", "root", "types"),
    [
        ({"type": "string"}, {}, {"string"}),
        ({"type": ["string", "null"], "anyOf": [{}]}, {}, {"string", "null"}),
        ({"anyOf": [{"const": "a"}, {"oneOf": [{"const": None}, {"const": 1}]}]}, {}, {"string", "null", "integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, {}, set()),
        ({"enum": ["a", 1.5]}, {}, {"string", "number"}),
        (True, {}, set()),
        (REFERENCE, definitions({"type": "integer"}), {"integer"}),
        (REFERENCE, definitions({"anyOf": [REFERENCE, {"type": "null"}]}), {"null"}),
        (REFERENCE, definitions(REFERENCE), set()),
    ],
)
def test_types(schema: object, root: dict[str, Any], types: set[str]) -> None:
    assert json_types(schema, root) == types


def test_the_work_does_not_grow_with_the_number_of_paths_through_the_options() -> None:
    """Each of 30 schemas has the next one as two options, so there are 2 ** 30 paths."""
    number = 30
    chain: dict[str, object] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(number)}
    chain[f"d{number}"] = {"type": "integer"}
    assert json_types({"$ref": "#/$defs/d0"}, {"$defs": chain}) == {"integer"}


def test_the_types_of_very_many_options_are_unknown() -> None:
    options = [{"enum": [i]} for i in range(MAX_OPTIONS)]
    assert json_types({"anyOf": options[1:]}, {}) == {"integer"}
    assert json_types({"anyOf": options}, {}) == frozenset()
