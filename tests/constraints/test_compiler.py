"""Tests compiled grammars: the texts that they accept, errors of bad grammars, copies, and the end token."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from typing import Any

import numpy as np
import pytest

from llm_serving.config import load_config
from llm_serving.constraints.compiler import CompiledGrammar, GrammarCompiler
from llm_serving.constraints.grammar import ANY_JSON_OBJECT, LARK, REGEX, Grammar, choice_grammar, schema_grammar
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import RequestError
from llm_serving.request import ConstraintError
from support.small_tokenizers import open_tokenizer, write_llama2_folder

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Compiler:
    """Compiles grammars for a tokenizer and checks texts. The model has 7 more token ids than the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size + 7
        self.end = self.tokenizer.eos_token_ids[0]
        self.compiler = GrammarCompiler(self.tokenizer, self.vocab_size, [self.end])

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return asyncio.run(self.compiler.compile(grammar, "field"))

    def token(self, character: str) -> int:
        return next(i for i in range(3, self.vocab_size) if self.tokenizer.token_bytes(i) == character.encode())

    def allowed(self, mask: Any) -> set[int]:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Returns whether the grammar allows the tokens of exactly this text, and then the end token."""
        constraint = self.compile(grammar).start()
        for token in [*self.tokenizer.encode(text, add_special_tokens=False), self.end]:
            if token not in self.allowed(constraint.mask()):
                return False
            if token != self.end:
                constraint.advance(token)
        return True


@functools.cache
def byte_level() -> Compiler:
    return Compiler(load_tokenizer(load_config("llama_tiny_cpu.yaml")))


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """Returns the compiler for a byte-level tokenizer or for SentencePiece.

    SentencePiece puts a space before each text. Therefore the grammar library must not tokenize parts of a text with
    it.
    """
    if request.param == "byte-level":
        return byte_level()
    return Compiler(open_tokenizer(write_llama2_folder(tmp_path_factory.mktemp("tokenizer"))))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema_grammar(PERSON), '{"name": "Bob", "age": 7}', '{"name": "Bob"}'),
        (schema_grammar(json.dumps(PERSON)), '{"name":"B","age":150}', '{"name": "B", "age": 151}'),
        (ANY_JSON_OBJECT, '{"a": [1, null, {"b": "c"}]}', "[1]"),
        (Grammar(REGEX, "[a-c]+-[0-9]{2}"), "abc-12", "abc-1"),
        (choice_grammar(["yes", "no (why?)", "a.b"]), "no (why?)", "a-b"),
        (Grammar(LARK, 'start: "x" | "x" start'), "xxx", "xy"),
    ],
    ids=["schema", "schema as text", "any object", "regex", "choice", "lark"],
)
def test_texts_are_accepted_or_not(grammar: Grammar, good: str, bad: str) -> None:
    compiler = byte_level()
    assert compiler.accepts(grammar, good)
    assert not compiler.accepts(grammar, bad)


def test_a_random_walk_through_the_masks_gives_text_that_fits(compiler: Compiler) -> None:
    rng = random.Random(0)
    for _ in range(20):
        constraint, tokens = compiler.compile(schema_grammar(PERSON)).start(), []
        while (token := rng.choice(sorted(compiler.allowed(constraint.mask())))) != compiler.end:
            constraint.advance(token)
            tokens.append(token)
            assert len(tokens) < 1000
        person = json.loads(b"".join(map(compiler.tokenizer.token_bytes, tokens)))
        assert set(person) == {"name", "age"}
        assert len(person["name"]) <= 8
        assert 0 <= person["age"] <= 150


def test_no_mask_allows_an_id_beyond_the_vocabulary_or_a_special_token(compiler: Compiler) -> None:
    constraint = compiler.compile(Grammar(REGEX, "(?s:.*)")).start()
    allowed = compiler.allowed(constraint.mask())
    assert max(allowed) < compiler.vocab_size
    assert allowed & compiler.tokenizer.special_token_ids == {compiler.end}


def test_copies_of_a_grammar_do_not_disturb_each_other(compiler: Compiler) -> None:
    compiled = compiler.compile(choice_grammar(["aa", "ab"]))
    first, second = compiled.start(), compiled.start()
    before = second.mask().tolist()
    first.advance(compiler.token("a"))
    assert second.mask().tolist() == before
    assert compiled.start().mask().tolist() == before


def test_a_token_that_does_not_fit_is_an_error_and_every_token_may_follow(compiler: Compiler) -> None:
    constraint = compiler.compile(Grammar(REGEX, "[0-9]+")).start()
    with pytest.raises(ConstraintError, match="the grammar cannot be followed"):
        constraint.advance(compiler.token("x"))
    assert constraint.mask().tolist() == [0xFFFFFFFF] * constraint.num_words


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema_grammar({"not": {"type": "string"}}), 'Unimplemented keys: \\["not"\\]'),
        (schema_grammar({"oneOf": [{"type": "string"}, {}]}), 'Unimplemented keys: \\["oneOf"\\], .* use anyOf'),
        (schema_grammar({"$ref": "http://localhost/a.json"}), "the \\$ref 'http://localhost/a.json' names a schema"),
        (schema_grammar({"type": "string", "format": "weird"}), "Unknown format: weird"),
        (schema_grammar("{"), "cannot be used"),
        (schema_grammar({"type": "string", "minLength": 5, "maxLength": 2}), "cannot be used"),
        (Grammar(REGEX, "a("), "unclosed group"),
        (Grammar(LARK, "start: foo"), 'unknown name: "foo"'),
        (Grammar(REGEX, "é" * 40_000), "has 80000 bytes; the maximum is 65536"),
        (Grammar(LARK, f"start: {' | '.join(f'a{i}' for i in range(6000))}\n"), "unknown name"),
    ],
    ids=[
        *("keyword", "one of", "reference", "format", "not JSON"),
        *("impossible", "regex", "lark", "too long", "many names"),
    ],
)
def test_bad_grammars_are_refused_with_the_reason(compiler: Compiler, grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        compiler.compile(grammar)
    assert error.value.param == "field"


def test_a_model_without_an_end_token_has_no_structured_output(compiler: Compiler) -> None:
    without_end = GrammarCompiler(compiler.tokenizer, compiler.vocab_size, [])
    with pytest.raises(RequestError, match="needs a token that ends the text"):
        asyncio.run(without_end.compile(ANY_JSON_OBJECT, "field"))
