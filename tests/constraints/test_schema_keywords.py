"""Tests the rewriting of schema keywords: what is rewritten, what stays, and which texts the grammars then accept."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import pytest

from llm_serving.config import load_config
from llm_serving.constraints.compiler import GrammarCompiler
from llm_serving.constraints.grammar import schema_grammar
from llm_serving.constraints.schema_keywords import rewritten, rewritten_text
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import RequestError

A = {"type": "integer"}

SAME_MEANING: list[tuple[Any, Any]] = [
    (True, {}),
    ({"maxItems": 2.0, "minLength": 1}, {"maxItems": 2, "minLength": 1}),
    ({"then": A, "else": A, "type": "string"}, {"type": "string"}),
    ({"if": A}, {}),
    ({"if": A, "then": True, "else": {}}, {}),
    ({"maxContains": 1, "minContains": 1}, {}),
    ({"contains": A, "minContains": 0}, {}),
    ({"uniqueItems": False, "not": False, "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}}, {}),
    ({"unevaluatedProperties": True, "unevaluatedItems": {}, "allOf": [A]}, {"allOf": [A]}),
    ({"properties": {"a": A}, "unevaluatedProperties": False}, {"properties": {"a": A}, "additionalProperties": False}),
    ({"additionalProperties": A, "unevaluatedProperties": False}, {"additionalProperties": A}),
    ({"prefixItems": [A], "unevaluatedItems": False}, {"prefixItems": [A], "items": False}),
    ({"propertyNames": {"type": "string"}, "additionalProperties": A}, {"additionalProperties": A}),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A},
        {"properties": {"a": A, "b": A}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"enum": [f"{i:04}" for i in range(2000)]}},
        {"properties": {f"{i:04}": True for i in range(2000)}, "additionalProperties": False},
    ),
    ({"propertyNames": {"pattern": "^x"}}, {"patternProperties": {"^x": True}, "additionalProperties": False}),
    ({"$dynamicAnchor": "a"}, {"$anchor": "a"}),
    ({"anyOf": [{"items": {"if": A}}], "$defs": {"if": {"then": A}}}, {"anyOf": [{"items": {}}], "$defs": {"if": {}}}),
]

OTHER_MEANING: list[Any] = [
    {"if": A, "then": {"minimum": 1}},
    {"contains": A, "minContains": 0, "maxContains": 1},
    {"uniqueItems": True, "not": A},
    {"dependentRequired": {"a": ["b"]}},
    {"allOf": [A], "unevaluatedProperties": False},
    {"contains": A, "unevaluatedItems": False},
    {"items": [A], "unevaluatedItems": False},
    {"propertyNames": {"enum": ["a"]}, "properties": {"b": A}},
    {"propertyNames": {"maxLength": 3}},
    {"propertyNames": {"enum": 5}},
    {"propertyNames": {"enum": list(map(str, range(100)))}, "additionalProperties": {"const": "x" * 200}},
    {"$dynamicAnchor": "a", "items": {"$dynamicRef": "#a"}},
    {"const": {"if": A, "maxItems": 2.0}, "enum": [{"uniqueItems": False}], "default": {"then": A}},
    {"properties": {"if": A, "uniqueItems": {"type": "string"}}},
    {"required": ["then"], "unknown": {"if": A}},
]


@pytest.mark.parametrize(("schema", "expected"), SAME_MEANING)
def test_keywords_are_rewritten(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert json.dumps(rewritten(schema), sort_keys=True) == json.dumps(expected, sort_keys=True)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("schema", OTHER_MEANING)
def test_keywords_with_another_meaning_stay(schema: Any) -> None:
    assert json.dumps(rewritten(schema)) == json.dumps(schema)


@pytest.mark.parametrize("text", ["{", '{"then": 1e999}', "[" * 5000, '{"type":  "string"}', "[1.5]", "null"])
def test_a_text_that_needs_no_change_or_is_no_schema_stays(text: str) -> None:
    assert rewritten_text(text) == text


@functools.cache
def _compiler() -> GrammarCompiler:
    tokenizer = load_tokenizer(load_config("llama_tiny_cpu.yaml"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_ids[0]])


def accepts(schema: object, value: object) -> bool:
    """Returns whether the grammar of a schema accepts a JSON value."""
    tokenizer = load_tokenizer(load_config("llama_tiny_cpu.yaml"))
    constraint = asyncio.run(_compiler().compile(schema_grammar(schema), "field")).start()
    for token_id in [*tokenizer.encode(json.dumps(value), add_special_tokens=False), tokenizer.eos_token_ids[0]]:
        if not int(constraint.mask()[token_id // 32]) >> token_id % 32 & 1:
            return False
        if token_id not in tokenizer.eos_token_ids:
            constraint.advance(token_id)
    return True


def test_the_grammar_enforces_the_keywords_in_their_other_form() -> None:
    closed = {"type": "object", "properties": {"a": A}, "unevaluatedProperties": False}
    assert accepts(closed, {"a": 1})
    assert not accepts(closed, {"a": 1, "b": 2})
    record = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A}
    assert accepts(record, {"a": 1, "b": 2})
    assert not accepts(record, {"c": 1})
    assert not accepts(record, {"a": "x"})
    pair = {"type": "array", "prefixItems": [A], "unevaluatedItems": False, "maxItems": 2.0}
    assert accepts(pair, [1])
    assert not accepts(pair, [1, 2])
    with pytest.raises(RequestError, match="unevaluatedProperties"):
        accepts({"anyOf": [closed], "unevaluatedProperties": False}, {})
