"""Tests compiled grammars: the texts that they accept, errors of bad grammars, copies, and the end token."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from llm_serving.config import load_config
from llm_serving.constraints import compile_queue
from llm_serving.constraints import compiler as compiler_module
from llm_serving.constraints.calls import CallableTool, answer_grammar
from llm_serving.constraints.compile_queue import MAX_COMPILING
from llm_serving.constraints.compiler import LIMITS, CompiledGrammar, GrammarCompiler
from llm_serving.constraints.grammar import (
    ANY_JSON_OBJECT,
    COMPOSED,
    LARK,
    MAX_COMPOSED_BYTES,
    MAX_GRAMMAR_BYTES,
    REGEX,
    Grammar,
    choice_grammar,
    schema_grammar,
)
from llm_serving.constraints.work_limits import (
    MAX_MULTIPLES,
    MAX_PATTERN_PROPERTIES,
    MAX_PATTERNS_TOGETHER,
    MAX_PROPERTIES,
)
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import RequestError
from llm_serving.parsing.formats import TOOL_FORMATS
from llm_serving.request import ConstraintError
from support.small_tokenizers import open_tokenizer, write_llama2_folder
from support.time_limits import time_limit

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
        (schema_grammar(f'{{"multipleOf": {10**399}}}'), "number out of range"),
        (schema_grammar(f'{{"multipleOf": {10**399 + 1}}}'), "'multipleOf', .* is very large; the maximum is 100000"),
        (Grammar(LARK, f'start: %json {{"multipleOf": {10**399}}}\n'), "number out of range"),
        (Grammar(REGEX, "a("), "unclosed group"),
        (Grammar(LARK, "start: foo"), 'unknown name: "foo"'),
        (Grammar(LARK, 'root ::= "a"'), "'::=' belongs to GBNF; this server reads Lark"),
        (Grammar(LARK, 'a: "b"\n  root\t::= a'), "'::=' belongs to GBNF; this server reads Lark"),
        (Grammar(LARK, 'start: "::=" foo'), 'unknown name: "foo".* Change or remove this part.'),
        (Grammar(LARK, "\n" * 65_000 + "start: foo"), 'unknown name: "foo".* Change or remove this part.'),
        (Grammar(REGEX, "é" * 40_000), "has 80000 bytes; the maximum is 65536"),
        (Grammar(LARK, f"start: {' | '.join(f'a{i}' for i in range(6000))}\n"), "unknown name"),
    ],
    ids=[
        *("keyword", "one of", "reference", "format", "not JSON"),
        *("impossible", "large number", "large digits", "large number in lark"),
        *("regex", "lark", "gbnf", "gbnf rule", "quoted", "empty lines", "too long", "many names"),
    ],
)
def test_bad_grammars_are_refused_with_the_reason(compiler: Compiler, grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        compiler.compile(grammar)
    assert error.value.param == "field"


@pytest.mark.parametrize("kind", [COMPOSED, LARK])
def test_the_cause_of_a_grammar_that_is_too_long_is_found_without_the_library(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    limit = MAX_COMPOSED_BYTES if kind == COMPOSED else MAX_GRAMMAR_BYTES
    grammars = GrammarCompiler(byte_level().tokenizer, 1, [])
    monkeypatch.setattr(compiler_module.llguidance, "LLMatcher", None)
    reason = asyncio.run(grammars.problem_of(Grammar(kind, "a" * (limit + 1))))
    assert reason == f"its grammar has {limit + 1} bytes; the maximum is {limit}"


def test_a_model_without_an_end_token_has_no_structured_output(compiler: Compiler) -> None:
    without_end = GrammarCompiler(compiler.tokenizer, compiler.vocab_size, [])
    with pytest.raises(RequestError, match="needs a token that ends the text"):
        asyncio.run(without_end.compile(ANY_JSON_OBJECT, "field"))


NUMBERS = schema_grammar({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(50)}})
WORDS = Grammar(REGEX, "(a|b)*a(a|b){10}")


@pytest.mark.parametrize(
    ("limit", "value", "grammar"),
    [
        ("max_grammar_size", 10, NUMBERS),
        ("initial_lexer_fuel", 10, NUMBERS),
        ("max_lexer_states", 5, WORDS),
        ("step_lexer_fuel", 5, WORDS),
        ("step_max_items", 3, NUMBERS),
        ("max_items_in_row", 3, NUMBERS),
    ],
)
def test_each_limit_of_the_library_is_set_and_named(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, grammar: Grammar
) -> None:
    compiler = Compiler(byte_level().tokenizer)
    compiler.compile(grammar)
    monkeypatch.setitem(LIMITS, limit, (value, LIMITS[limit][1]))
    with pytest.raises(RequestError, match=f"it needs more than {value} .*, the limit {limit}"):
        Compiler(byte_level().tokenizer).compile(grammar)


COMBINED = [{"type": "string", "pattern": f"a{i}.*b"} for i in range(MAX_PATTERNS_TOGETHER + 1)]
PRIMES = {f"p{i}": {"type": "integer", "multipleOf": value} for i, value in enumerate((30011, 30013, 40009))}
TEXTS = {f"p{i}": one for i, one in enumerate(COMBINED)}
WORK = {
    "properties": ({"properties": {str(i): {} for i in range(MAX_PROPERTIES + 1)}}, MAX_PROPERTIES),
    "required": ({"required": [str(i) for i in range(MAX_PROPERTIES + 1)]}, MAX_PROPERTIES),
    "patternProperties": (
        {"patternProperties": {f"^{i:03}$": {} for i in range(MAX_PATTERN_PROPERTIES + 1)}}, MAX_PATTERN_PROPERTIES
    ),
    "multipleOf": ({"properties": PRIMES}, MAX_MULTIPLES),
    "multipleOf of one number": ({"allOf": [{"multipleOf": value} for value in (101, 103, 107)]}, MAX_MULTIPLES),
    "patterns in allOf": ({"allOf": COMBINED}, MAX_PATTERNS_TOGETHER),
    "patterns of references": (
        {"$defs": {"a": {"allOf": COMBINED[:6]}}, "properties": {"b": {"$ref": "#/$defs/a", "allOf": COMBINED[6:]}}},
        MAX_PATTERNS_TOGETHER,
    ),
    "patterns of merged properties": (
        {"allOf": [{"properties": {"a": one}} for one in COMBINED]}, MAX_PATTERNS_TOGETHER
    ),
}  # fmt: skip
"""Schemas that would keep the library busy for seconds or hours, each with the limit that refuses it."""


def as_tool(schema: object) -> Grammar:
    assert isinstance(schema, dict)
    return answer_grammar({}, tool_format=TOOL_FORMATS["hermes"], tools=[CallableTool("f", schema)], is_required=True)


def as_lark(schema: object) -> Grammar:
    return Grammar(LARK, f"start: value // a schema\nvalue: %json # here\n {json.dumps(schema)}\n")


@pytest.mark.parametrize("form", [schema_grammar, as_tool, as_lark])
@pytest.mark.parametrize("name", WORK)
def test_schemas_that_take_too_long_are_refused_before_the_library_sees_them(
    monkeypatch: pytest.MonkeyPatch, name: str, form: Any
) -> None:
    schema, limit = WORK[name]
    monkeypatch.setattr(compiler_module.llguidance, "LLMatcher", None)
    with pytest.raises(RequestError, match=f"; the maximum is {limit}"):
        byte_level().compile(form(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {str(i): {"type": "null"} for i in range(300)}, "required": [str(i) for i in range(300)]},
        {"properties": {f"p{i}": {"type": "number", "multipleOf": 10**i} for i in range(7)}},
        {"properties": {f"p{i}": {"type": "integer", "multipleOf": 1000 + i} for i in range(20)}},
        {"properties": TEXTS},
        {"anyOf": COMBINED},
        {"$defs": TEXTS, "properties": {f"p{i}": {"$ref": f"#/$defs/p{i}"} for i in range(len(TEXTS))}},
        {"allOf": [{"properties": TEXTS}, {"required": ["p1"]}]},
    ],
    ids=["properties", "powers of ten", "numbers", "texts", "options", "references", "one object"],
)
def test_schemas_whose_parts_do_not_apply_to_the_same_value_are_accepted(schema: dict[str, Any]) -> None:
    byte_level().compile(schema_grammar({**schema, "type": "object"} if "anyOf" not in schema else schema))


@pytest.mark.parametrize("operator", [" & ", " & ~"])
def test_a_grammar_may_not_combine_too_many_patterns(operator: str) -> None:
    patterns = [f"/(.*)a{i} & ~ b/" for i in range(MAX_PATTERNS_TOGETHER + 1)]
    with pytest.raises(RequestError, match=f"combine .* patterns; the maximum is {MAX_PATTERNS_TOGETHER}"):
        byte_level().compile(Grammar(LARK, f"start: A\nA: {operator.join(patterns)}\n"))
    byte_level().compile(Grammar(LARK, f"start: A\nA: {' | '.join(patterns)} // & & & & & & & & & & &\n"))


CHAIN = """
import sys; sys.path[:0] = sys.argv[1:]
from constraints import test_compiler as tests
links = {f"{i:x}": {"items": {"$ref": f"#/$defs/{i + 1:x}"}} for i in range(1500)}
tests.byte_level().compile(tests.schema_grammar({"$defs": {**links, f"{1500:x}": {}}, "$ref": "#/$defs/0"}))
rules = "".join(f"r{i}: r{i + 1}\\n" for i in range(4000))
tests.byte_level().compile(tests.Grammar(tests.LARK, f'start: r0\\n{rules}r4000: "x"\\n'))
print("compiled")
"""


def test_long_chains_of_references_do_not_end_the_process() -> None:
    """Runs in a process of its own, because an overflow of the stack would end it."""
    command = [sys.executable, "-c", CHAIN, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit(60), check=False)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr


class SlowCompiler(GrammarCompiler):
    """A compiler whose threads wait until the event loop lets them continue."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, tokenizer.vocab_size, list(tokenizer.eos_token_ids))
        self.started = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.running: set[Grammar] = set()
        self.begun: list[Grammar] = []

    @property
    def places(self) -> tuple[int, int]:
        """The numbers of compilations that run and that wait, as the queue counts them."""
        return self._queue._num_running, self._queue.num_waiting

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        self.running.add(grammar)
        self.begun.append(grammar)
        self.started.release()
        assert self.go_on.acquire(timeout=time_limit(20)), "the event loop is blocked"
        self.running.discard(grammar)
        return super()._compile(grammar)


def run_slowly(test: Callable[[SlowCompiler], Awaitable[None]]) -> None:
    """Runs a test with a slow compiler. If the test fails, its threads continue, so that the event loop can end."""

    async def run() -> None:
        compiler = SlowCompiler(byte_level().tokenizer)
        try:
            await test(compiler)
        finally:
            compiler.go_on.release(1000)

    asyncio.run(run())


async def has_started(compiler: SlowCompiler) -> None:
    """Lets the event loop run until a compilation has started."""
    for _ in range(int(time_limit(20_000))):
        if compiler.started.acquire(blocking=False):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no compilation has started")


def test_a_slow_compilation_does_not_block_the_event_loop() -> None:
    async def run(compiler: SlowCompiler) -> None:
        task = asyncio.create_task(compiler.compile(ANY_JSON_OBJECT, "field"))
        await has_started(compiler)
        compiler.go_on.release()
        assert isinstance(await task, CompiledGrammar)

    run_slowly(run)


def test_few_grammars_are_compiled_at_the_same_time() -> None:
    async def run(compiler: SlowCompiler) -> None:
        grammars = [choice_grammar([text]) for text in ("a", "b", "c", "d")]
        tasks = [asyncio.create_task(compiler.compile(grammar, "field")) for grammar in grammars]
        for _ in range(MAX_COMPILING):
            await has_started(compiler)
        for waiting in range(len(grammars) - MAX_COMPILING, 0, -1):
            assert compiler.places == (MAX_COMPILING, waiting)
            assert len(compiler.running) == MAX_COMPILING
            compiler.go_on.release()
            await has_started(compiler)
        for _ in range(MAX_COMPILING):
            compiler.go_on.release()
        await asyncio.gather(*tasks)

    run_slowly(run)


def test_requests_for_the_same_grammar_wait_for_one_compilation() -> None:
    async def run(compiler: SlowCompiler) -> None:
        tasks = [asyncio.create_task(compiler.compile(ANY_JSON_OBJECT, "field", "a")) for _ in range(5)]
        await has_started(compiler)
        tasks[0].cancel()
        compiler.go_on.release()
        found = await asyncio.gather(*tasks[1:])
        assert len(set(map(id, found))) == 1
        assert compiler.begun == [ANY_JSON_OBJECT]

    run_slowly(run)


def test_a_bad_grammar_is_compiled_again_after_an_error() -> None:
    async def run(compiler: SlowCompiler) -> None:
        bad = Grammar(REGEX, "(")
        for _ in range(2):
            compiler.go_on.release()
            with pytest.raises(RequestError, match="cannot be used"):
                await compiler.compile(bad, "field")
        assert compiler.begun == [bad, bad]

    run_slowly(run)


def test_requests_that_end_early_do_not_let_more_grammars_be_compiled_at_the_same_time() -> None:
    async def run(compiler: SlowCompiler) -> None:
        grammars = [choice_grammar([text]) for text in "abcd"]
        tasks = [asyncio.create_task(compiler.compile(grammar, "field")) for grammar in grammars]
        for _ in range(MAX_COMPILING):
            await has_started(compiler)
        for task in tasks[:MAX_COMPILING]:
            task.cancel()
        await asyncio.gather(*tasks[:MAX_COMPILING], return_exceptions=True)
        for _ in range(20):
            await asyncio.sleep(0)  # lets tasks end that would be cancelled wrongly
        assert compiler.places == (MAX_COMPILING, len(grammars) - MAX_COMPILING)
        assert len(compiler.begun) == MAX_COMPILING
        for _ in grammars:
            compiler.go_on.release()
        await asyncio.gather(*tasks[MAX_COMPILING:])

    run_slowly(run)


async def with_running(compiler: SlowCompiler) -> list[asyncio.Task[CompiledGrammar]]:
    """Starts as many compilations as may run at the same time. Returns their requests."""
    grammars = [choice_grammar([f"running {number}"]) for number in range(compile_queue.MAX_COMPILING)]
    tasks = [asyncio.create_task(compiler.compile(grammar, "field", "other")) for grammar in grammars]
    for _ in tasks:
        await has_started(compiler)
    return tasks


def test_grammars_for_which_no_request_waits_any_more_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tenant's limit counts them no longer."""
    monkeypatch.setattr(compile_queue, "MAX_WAITING_OF_TENANT", 3)

    async def run(compiler: SlowCompiler) -> None:
        running = await with_running(compiler)
        grammars = [choice_grammar([text]) for text in "abc"]
        tasks = [asyncio.create_task(compiler.compile(grammar, "field", "key")) for grammar in grammars * 2]
        await asyncio.sleep(0)
        for task in tasks[:3]:
            task.cancel()
        await asyncio.gather(*tasks[:3], return_exceptions=True)
        assert compiler.places == (MAX_COMPILING, 3), "a second request waits for each grammar"
        for task in tasks[3:5]:
            task.cancel()
        again = asyncio.create_task(compiler.compile(grammars[1], "field", "key"))
        await asyncio.gather(*tasks[3:5], return_exceptions=True)
        assert compiler.places == (MAX_COMPILING, 2)
        for _ in range(MAX_COMPILING + 2):
            compiler.go_on.release()
        await asyncio.gather(*running, tasks[5], again)
        assert set(compiler.begun[MAX_COMPILING:]) == {grammars[2], grammars[1]}
        assert len(compiler.begun) == MAX_COMPILING + 2
        assert compiler.places == (0, 0)

    run_slowly(run)


def test_a_grammar_whose_request_ended_during_its_compilation_is_known_afterwards() -> None:
    async def run(compiler: SlowCompiler) -> None:
        task = asyncio.create_task(compiler.compile(ANY_JSON_OBJECT, "field", "key"))
        await has_started(compiler)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        [compilation] = compiler._compiling.values()
        compiler.go_on.release(2)  # a second compilation would be wrong, but it would end
        compiled = await compilation.task
        assert await compiler.compile(ANY_JSON_OBJECT, "field", "key") is compiled
        assert compiler.begun == [ANY_JSON_OBJECT]

    run_slowly(run)


def test_tenants_that_wait_with_the_same_grammar_get_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "MAX_COMPILING", 1)

    async def run(compiler: SlowCompiler) -> None:
        running = await with_running(compiler)
        tasks = [asyncio.create_task(compiler.compile(ANY_JSON_OBJECT, "field", f"key {n}")) for n in range(20)]
        while compiler.places[1] < len(tasks):
            await asyncio.sleep(0)
        for _ in range(len(running) + len(tasks)):
            compiler.go_on.release()
        found = await asyncio.gather(*tasks)
        assert len(set(map(id, found))) == 1
        assert compiler.begun.count(ANY_JSON_OBJECT) == 1

    run_slowly(run)
