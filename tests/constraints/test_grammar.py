"""Tests the length limit of schemas and choices, which applies before they are converted to text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_serving.constraints.grammar import MAX_GRAMMAR_BYTES, _least_chars, choice_grammar, schema_grammar
from llm_serving.errors import RequestError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=30)
@given(JSON_VALUES)
def test_the_counted_size_is_at_most_the_size_of_the_text(schema: object) -> None:
    assert _least_chars(schema, 10**9) <= len(json.dumps(schema, ensure_ascii=False))


def test_a_schema_of_the_maximum_size_is_accepted_and_a_larger_one_is_not() -> None:
    rest = len(json.dumps({"title": ""}))
    schema = {"title": "a" * (MAX_GRAMMAR_BYTES - rest)}
    assert len(schema_grammar(schema).text) == MAX_GRAMMAR_BYTES
    with pytest.raises(RequestError, match=f"'field' has at least .* the maximum is {MAX_GRAMMAR_BYTES}"):
        schema_grammar({"title": "a" * MAX_GRAMMAR_BYTES}, "field")


def test_choices_of_the_maximum_size_are_accepted_and_larger_ones_are_not() -> None:
    assert choice_grammar(["a" * (MAX_GRAMMAR_BYTES - 1), "b"]).text.endswith("|(?:b)")
    with pytest.raises(RequestError, match=f"'field' has at least {MAX_GRAMMAR_BYTES + 1} bytes"):
        choice_grammar(["a" * MAX_GRAMMAR_BYTES, "b"], "field")
