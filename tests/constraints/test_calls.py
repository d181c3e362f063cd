"""Tests the grammars of tool calls. A grammar accepts the calls that a model may write in its tool format.

If the model reasons, the grammar begins after the reasoning.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_serving.constraints.calls import (
    CallableTool,
    LongGrammarError,
    Thinking,
    UnsupportedToolError,
    answer_grammar,
    has_free_text,
)
from llm_serving.constraints.compiler import CompiledGrammar, GrammarCompiler
from llm_serving.constraints.grammar import MAX_COMPOSED_BYTES, REGEX, Grammar, schema_grammar
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from llm_serving.request import ConstraintError
from support.call_fixtures import WRITERS, fixtures_of
from support.small_tokenizers import open_tokenizer, write_llama2_folder
from tools.call_golden.cases import TOOLS as PUBLISHED_TOOLS

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [CallableTool("weather", WEATHER), CallableTool("now", None)]
THINK = REASONING_FORMATS["think"]
PUBLISHED = json.loads((Path(__file__).parents[1] / "golden" / "calls.json").read_text("utf-8"))
"""Calls that other programs have written, see ``tools/make_call_golden.py``."""
END = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(write_llama2_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [END])


class Language:
    """The texts that a grammar accepts."""

    def __init__(self, compiler: GrammarCompiler, special: dict[str, int], **options: Any) -> None:
        self._special = special
        tokenizer = compiler._model_tokenizer
        grammar = answer_grammar(special, **options)
        self._compiled: CompiledGrammar = asyncio.run(compiler.compile(grammar, "tools"))
        ordinary = (i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_token_ids)
        self._ids = {tokenizer.token_bytes(i): i for i in ordinary}

    def __contains__(self, text: str) -> bool:
        constraint = self._compiled.start()
        try:
            for token in self._tokens(text):
                constraint.advance(token)
        except ConstraintError:
            return False
        return bool(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[END])

    def _tokens(self, text: str) -> list[int]:
        for marker, token_id in self._special.items():
            before, found, after = text.partition(marker)
            if found:
                return [*self._tokens(before), token_id, *self._tokens(after)]
        return [self._ids[bytes([byte])] for byte in text.encode()]


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Returns the text of the given calls in the tool format ``name``."""
    form = TOOL_FORMATS[name]
    identifier = f"abcDEF123{form.after_id}" if form.id_pattern else ""
    texts = [form.begin.replace("{name}", tool) + identifier + WRITERS[form.arguments](values) + form.end
             for tool, values in calls]  # fmt: skip
    return form.open + form.between.join(texts) + form.close


GOOD, NOW = ("weather", {"city": "Bern", "days": 3}), ("now", {})
WRONG = [("weather", {"days": 3}), ("weather", {"city": "a", "days": 10}), ("other", {}), ("now", {"a": 1})]


def special_of(name: str, *, are_special: bool) -> dict[str, int]:
    """Returns the ids of the format's markers that are special tokens.

    The first markers have the ids 3, 4 and 5. Without ``are_special``, no marker is a special token.
    """
    markers = TOOL_FORMATS[name].markers
    return dict(zip(markers, (3, 4, 5), strict=False)) if are_special else {}


CASES = [(name, False) for name in TOOL_FORMATS if name != "gpt_oss"]
CASES += [(name, True) for name in ("llama3_json", "mistral", "mistral_named", "mistral_args", "mistral_id", "hermes")]


@pytest.mark.parametrize(("name", "are_special"), CASES)
def test_required_calls(compiler: GrammarCompiler, name: str, are_special: bool) -> None:
    special = special_of(name, are_special=are_special)
    language = Language(compiler, special, tool_format=TOOL_FORMATS[name], tools=TOOLS, is_required=True)
    for calls in ([GOOD], [NOW], [GOOD, NOW, GOOD]):
        assert written(name, *calls) in language
    for call in WRONG:
        assert written(name, call) not in language
    assert "" not in language
    assert "Hello." not in language
    one = Language(compiler, special, tool_format=TOOL_FORMATS[name], tools=TOOLS, is_required=True, is_parallel=False)
    assert written(name, GOOD) in one
    assert written(name, GOOD, GOOD) not in one


@pytest.mark.parametrize(("name", "are_special"), CASES)
def test_calls_that_the_model_decides_on(compiler: GrammarCompiler, name: str, are_special: bool) -> None:
    special = special_of(name, are_special=are_special)
    language = Language(compiler, special, tool_format=TOOL_FORMATS[name], tools=TOOLS)
    for text in ("", "Hello, you.\n", "a < b [x] <|", written(name, GOOD), written(name, GOOD, NOW)):
        assert text in language, text
    if name != "llama3_json":
        assert "I look. " + written(name, NOW) + " Done" in language
    for call in WRONG:
        is_content = name == "pythonic" and call[0] == "other"  # only the name of a tool shows a call in this format
        assert (written(name, call) in language) is is_content
    one = Language(compiler, special, tool_format=TOOL_FORMATS[name], tools=TOOLS, is_parallel=False)
    assert written(name, GOOD) in one
    if name != "llama3_json":
        assert written(name, GOOD, GOOD) not in one


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v31"])
@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize("marker_id", [None, 5])
def test_the_grammar_begins_after_the_reasoning(
    compiler: GrammarCompiler, name: str, is_required: bool, marker_id: int | None
) -> None:
    special = {} if marker_id is None else {"<think>": 4, "</think>": marker_id}
    bad, good = written(name, WRONG[0]), written(name, GOOD)
    for is_open in (True, False):
        language = Language(
            compiler, special, tool_format=TOOL_FORMATS[name], tools=TOOLS, is_required=is_required,
            thinking=Thinking(THINK, is_open),
        )  # fmt: skip
        opening = "" if is_open else "<think>"
        assert f"{opening}\nHm, {bad}\n</think>\n\n{good}" in language
        assert f"{opening}\nHm.\n</think>\n\n{bad}" not in language
        assert f"{opening}\nHm." not in language
        assert (f"{opening}\nHm.\n</think>\n\nHello." in language) is not is_required
        assert (good in language) is not is_open


def test_gpt_oss_calls(compiler: GrammarCompiler) -> None:
    form, channels = TOOL_FORMATS["gpt_oss"], REASONING_FORMATS["channels"]
    language = Language(
        compiler, {}, tool_format=form, tools=TOOLS, is_required=True, thinking=Thinking(channels, False)
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert written("gpt_oss", GOOD) in language
    assert thought + written("gpt_oss", GOOD) in language
    assert thought + written("gpt_oss", WRONG[0]) not in language


def test_gpt_oss_calls_that_the_model_decides_on(compiler: GrammarCompiler) -> None:
    special = {"<|channel|>": 0, "<|message|>": 1, "<|end|>": 3, "<|start|>": 4, "<|constrain|>": 5}
    form = TOOL_FORMATS["gpt_oss"]
    assert has_free_text(form, special)
    assert not has_free_text(form, {})
    language = Language(compiler, special, tool_format=form, tools=TOOLS)
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    for text in ("<|channel|>final<|message|>Hello.", written("gpt_oss", GOOD)):
        for before in ("", thought, thought + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"):
            assert before + text in language
    for call in WRONG:
        assert thought + written("gpt_oss", call) not in language
    assert "Hello." not in language
    content = schema_grammar({"type": "object", "properties": {}, "additionalProperties": False})
    language = Language(compiler, special, thinking=Thinking(REASONING_FORMATS["channels"], False), content=content)
    assert thought + "<|channel|>final<|message|>{}" in language
    assert thought + "<|channel|>final<|message|>[]" not in language


def test_content_with_a_schema_after_the_reasoning(compiler: GrammarCompiler) -> None:
    content = schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    language = Language(compiler, {}, thinking=Thinking(THINK, True), content=content)
    assert 'Hm, {"b"</think>\n\n{"a": 1}' in language
    assert 'Hm</think>\n\n{"b": 1}' not in language
    language = Language(compiler, {}, thinking=Thinking(THINK, False), content=Grammar(REGEX, "a/[0-9]+"))
    assert "<think>x</think>a/12" in language
    assert "a/12" in language
    assert "<think>x</think>b" not in language
    language = Language(compiler, {}, tool_format=TOOL_FORMATS["hermes"], tools=TOOLS, content=content)
    assert '{"a": 1}' in language
    assert written("hermes", GOOD) in language
    assert "Hello." not in language


def test_tools_that_are_not_strict_take_any_object(compiler: GrammarCompiler) -> None:
    for name in ("hermes", "qwen3_coder"):
        tools = [CallableTool("weather", WEATHER, is_strict=False)]
        language = Language(compiler, {}, tool_format=TOOL_FORMATS[name], tools=tools, is_required=True)
        assert written(name, ("weather", {"other": "x", "days": 12})) in language
        assert written(name, ("other", {})) not in language


def test_parameters_in_tags(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "$defs": {"Color": {"enum": ["red", "blue"], "type": "string"}, "Size": {"type": "integer", "minimum": 1}},
        "properties": {
            "color": {"$ref": "#/$defs/Color"},
            "size": {"allOf": [{"$ref": "#/$defs/Size"}]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/Color"}},
        },
        "required": ["color"],
    }
    tools = [CallableTool("paint", schema)]
    language = Language(compiler, {}, tool_format=TOOL_FORMATS["qwen3_coder"], tools=tools, is_required=True)
    for values in ({"color": "red"}, {"color": "blue", "size": 2, "note": "a\n<b>", "tags": ["red"]}):
        assert written("qwen3_coder", ("paint", values)) in language
    for values in ({"color": "green"}, {"size": 1}, {"color": "red", "size": 0}, {"color": "red", "tags": ["x"]}):
        assert written("qwen3_coder", ("paint", values)) not in language


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_definitions_are_copied_only_for_parameters_with_references(name: str) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"$ref": "#/$defs/c"}}}
    schema = {"type": "object", "$defs": {"c": {"type": "integer"}}, "properties": properties}
    text = answer_grammar({}, tool_format=TOOL_FORMATS[name], tools=[CallableTool("f", schema)]).text
    assert text.count("$defs\\\":") == 1


def test_a_grammar_that_is_too_long_is_not_composed() -> None:
    schema = {"type": "object", "properties": {"a" * 30_000: {"type": "integer"}}}
    tools = [CallableTool(f"f{i}", schema) for i in range(MAX_COMPOSED_BYTES // 30_000 + 1)]
    answer_grammar({}, tool_format=TOOL_FORMATS["hermes"], tools=tools[1:])
    with pytest.raises(LongGrammarError):
        answer_grammar({}, tool_format=TOOL_FORMATS["hermes"], tools=tools)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "minLength": 2}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}}},
        {"properties": {"a": {}}, "minProperties": 1},
        {"properties": {"a>": {}}},
        {"properties": {"a": {"type": "string", "enum": ["x", "yy"], "minLength": 2}}},
        {"properties": {"a": {"type": "string", "enum": [1]}}},
    ],
)
def test_limits_of_texts_in_tags_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedToolError, match="in the format of this model"):
        answer_grammar({}, tool_format=TOOL_FORMATS["qwen3_coder"], tools=[CallableTool("f", schema)])
    answer_grammar({}, tool_format=TOOL_FORMATS["qwen3_coder"], tools=[CallableTool("f", schema, is_lenient=True)])


@pytest.mark.parametrize("schema", [{"properties": []}, {"properties": {}, "required": 5}])
def test_parameters_in_tags_must_be_listed(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedToolError, match="must be an object"):
        answer_grammar({}, tool_format=TOOL_FORMATS["qwen3_coder"], tools=[CallableTool("f", schema, is_lenient=True)])


def test_a_lenient_grammar_enforces_the_rest_of_the_schema(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "minProperties": 1,
        "properties": {
            "url": {"type": "string", "format": "uri", "minLength": 5},
            "mode": {"type": "string", "enum": ["read", "write", 7]},
            "days": {"type": "integer", "minimum": 1},
            "a>b": {"type": "string"},
        },
        "required": ["url"],
    }
    tools = [CallableTool("fetch", schema, is_lenient=True)]
    language = Language(compiler, {}, tool_format=TOOL_FORMATS["qwen3_coder"], tools=tools, is_required=True)
    for values in ({"url": "x"}, {"url": "x", "mode": "read", "days": 2}):
        assert written("qwen3_coder", ("fetch", values)) in language
    for values in ({"mode": "read"}, {"url": "x", "mode": "other"}, {"url": "x", "days": 0}, {"url": "x", "a": "b"}):
        assert written("qwen3_coder", ("fetch", values)) not in language


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ],
)
def test_a_lenient_grammar_allows_any_parameters_if_the_schema_does_not_list_them(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    tools = [CallableTool("f", schema, is_lenient=True)]
    language = Language(compiler, {}, tool_format=TOOL_FORMATS["qwen3_coder"], tools=tools, is_required=True)
    assert written("qwen3_coder", ("f", {"b": "x"})) in language


def test_the_fixtures_of_every_format_fit_its_grammar(compiler: GrammarCompiler) -> None:
    """The grammar of a format accepts the example texts (fixtures) of this format's parser.

    The grammar and the parser must agree on what a call looks like.
    """
    for name in (name for name in TOOL_FORMATS if name != "gpt_oss"):
        tools = [CallableTool(tool, None, is_strict=False) for tool in ("weather", "search-2", "now")]
        language = Language(compiler, {}, tool_format=TOOL_FORMATS[name], tools=tools, is_required=True)
        for fixture in fixtures_of(name)[:10]:
            assert fixture.text in language, (name, fixture.name)


def test_calls_in_the_form_of_python(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "$defs": {"Size": {"type": "integer", "minimum": 1}},
        "properties": {
            "first": {"type": "boolean"}, "size": {"$ref": "#/$defs/Size"}, "note": {"type": ["string", "null"]},
            "last": {"type": "array", "items": {"type": "boolean"}},
        },
        "required": ["size"],
    }  # fmt: skip
    tools = [CallableTool("paint", schema), CallableTool("now", None)]
    required = Language(compiler, {}, tool_format=TOOL_FORMATS["pythonic"], tools=tools, is_required=True)
    free = Language(compiler, {}, tool_format=TOOL_FORMATS["pythonic"], tools=tools)
    for text in (
        "[paint(size=1)]", "[paint(first=True, size=2, last=[true])]", '[paint(size=1, note="a]"), now()]',
        "[now(), paint(size=3, note=null)]",
    ):  # fmt: skip
        assert text in required, text
        assert text in free, text
    for text in (
        "[paint()]", "[paint(size=0)]", "[paint(first=1, size=1)]", "[paint(size=1, first=True)]", "[paint(size=1]",
        "[paint(, size=1)]", "[paint(size=1,)]", "[paint(size=1) now()]", "[now(a=1)]",
    ):  # fmt: skip
        assert text not in required, text
        assert text not in free, text
    for text in ("[1] and [now]", "[nowhere(1)]", "See [now(a=1)]", "[now]"):
        assert text in free, text
    wrong = [CallableTool("f", {"properties": {"a-b": {}}})]
    with pytest.raises(UnsupportedToolError, match="the name 'a-b' cannot be written"):
        answer_grammar({}, tool_format=TOOL_FORMATS["pythonic"], tools=wrong)
    schema = {"properties": {"a-b": {}, "c": {"type": "integer"}}, "minProperties": 1}
    lenient = [CallableTool("f", schema, is_lenient=True)]
    language = Language(compiler, {}, tool_format=TOOL_FORMATS["pythonic"], tools=lenient, is_required=True)
    assert "[f(c=1)]" in language
    assert "[f(c=x)]" not in language


def test_the_grammars_allow_published_calls(compiler: GrammarCompiler) -> None:
    """A grammar must not forbid the form of calls on which a model was trained. Other programs wrote these texts."""
    # The published template of ``pythonic`` writes texts without quotes, so its calls are ambiguous.
    for name in {one["format"] for one in PUBLISHED} - {"pythonic"}:
        thinking = Thinking(REASONING_FORMATS["channels"] if name == "gpt_oss" else THINK, False)
        tools = [CallableTool(tool["function"]["name"], tool["function"]["parameters"]) for tool in PUBLISHED_TOOLS]
        language = Language(
            compiler, {}, tool_format=TOOL_FORMATS[name], tools=tools, is_required=True, thinking=thinking
        )
        texts = [one["text"].removesuffix("<|call|>") for one in PUBLISHED
                 if one["format"] == name and one["case"] != "content before"]  # fmt: skip
        assert len(texts) >= 3
        for text in texts:
            assert text in language, (name, text)


def test_the_grammar_allows_a_published_call_after_content(compiler: GrammarCompiler) -> None:
    tools = [CallableTool("now", None)]
    formats = ("hermes", "qwen3_coder", "mistral", "mistral_id", "mistral_args", "deepseek_v3", "deepseek_v31")
    for name in formats:
        language = Language(
            compiler, {}, tool_format=TOOL_FORMATS[name], tools=tools, thinking=Thinking(THINK, False)
        )
        texts = [one["text"] for one in PUBLISHED if one["format"] == name and one["case"] == "content before"]
        assert texts
        for text in texts:
            assert text in language, (name, text)


def test_a_grammar_is_json() -> None:
    grammar = answer_grammar({}, tool_format=TOOL_FORMATS["hermes"], tools=TOOLS)
    assert json.loads(grammar.text)["grammars"][0]["name"] == "answer"
