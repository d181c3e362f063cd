"""Texts that models generate in each tool format, with the answer that a parser must find in each text.

The texts combine reasoning, content and tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm_serving.parsing.calls import CallOptions
from llm_serving.parsing.events import ParsedAnswer, ToolCall
from llm_serving.parsing.formats import TOOL_FORMATS, ToolFormat

Call = tuple[str, dict[str, Any]]

TYPES = {
    "weather": {"city": frozenset({"string"}), "days": frozenset({"integer"}), "exact": frozenset({"boolean"}),
                "at": frozenset({"object"}), "tags": frozenset({"array"}), "limit": frozenset({"number", "null"}),
                "note": frozenset({"string", "null"})},
    "search-2": {"query": frozenset({"string"})},
    "now": {},
}  # fmt: skip
OPTIONS = CallOptions(TYPES)


@dataclass(frozen=True)
class Fixture:
    """A text and the answer that a parser must find in it."""

    name: str
    text: str
    answer: ParsedAnswer
    is_thinking: bool = False


ONE_CALL: dict[str, dict[str, Any]] = {
    "text": {"city": "Bern"},
    "empty text": {"city": ""},
    "no arguments": {},
    "number": {"days": 3},
    "negative number": {"limit": -1.5e-3},
    "several": {"city": "Rio", "days": 2, "exact": True},
    "null": {"limit": None},
    "nested": {"at": {"lat": {"deg": [1, [2, {"x": []}]]}, "empty": {}}},
    "list of texts": {"tags": ["a", "b}", "]"]},
    "quotes": {"city": 'a "quoted" \\ word'},
    "braces in text": {"city": "}{][ }} ]"},
    "escapes": {"city": "tab\tnew\nline\u0001"},
    "end of a text in a backslash": {"city": "C:\\"},
    "chinese": {"city": "北京 🙂"},
    "markers in text": {"city": "<tool_call></tool_call> [TOOL_CALLS] <think> </think>"},
    "text like JSON": {"city": '{"name": "now", "arguments": {}}'},
    "number as text": {"city": "12"},
    "text or null": {"note": "null!"},
}
"""Arguments of one call of ``weather``."""

SEVERAL: dict[str, list[Call]] = {
    "two calls": [("weather", {"city": "Bern"}), ("search-2", {"query": "x y"})],
    "the same call twice": [("now", {}), ("now", {})],
    "three calls": [("now", {}), ("weather", {"days": 1, "tags": []}), ("search-2", {"query": "{"})],
}


def fixtures_of(format_name: str) -> list[Fixture]:
    """Returns at least 30 fixtures of a format."""
    tool_format = TOOL_FORMATS[format_name]
    write = WRITERS[tool_format.arguments]
    found = [_of_calls(tool_format, name, [("weather", values)], write) for name, values in ONE_CALL.items()]
    if tool_format.is_parallel:
        found += [_of_calls(tool_format, name, calls, write) for name, calls in SEVERAL.items()]
    found += [_content(name, text) for name, text in CONTENTS.items()] if format_name != "gpt_oss" else []
    found += SPECIAL[tool_format.parse.__name__]
    if format_name not in ("gpt_oss", "llama3_json", "pythonic"):
        before = _of_calls(tool_format, "", [("now", {})], write)
        found.append(
            Fixture("content before", f"Let me look.\n\n{before.text}", _answer("Let me look.", calls=[("now", "{}")]))
        )
        found.append(Fixture("content after", f"{before.text}\n Done.\n", _answer("Done.\n", calls=[("now", "{}")])))
        found += [
            Fixture(f"reasoning, then {one.name}", f"<think>\nWell, <tool_call> or not?\n</think>\n\n{one.text}",
                    _with_reasoning(one.answer, "Well, <tool_call> or not?"))
            for one in found[:2]
        ]  # fmt: skip
    return found


def _of_calls(tool_format: ToolFormat, name: str, calls: list[Call], write: Callable[[dict[str, Any]], str]) -> Fixture:
    written = [tool_format.begin.replace("{name}", tool) + _id(tool_format) + write(values) + tool_format.end
               for tool, values in calls]  # fmt: skip
    text = tool_format.open + tool_format.between.join(written) + tool_format.close
    return Fixture(
        name, text, _answer(calls=[(tool, json.dumps(values, ensure_ascii=False)) for tool, values in calls])
    )


def _id(tool_format: ToolFormat) -> str:
    return f"abcDEF123{tool_format.after_id}" if tool_format.id_pattern else ""


def _xml(values: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())


def _json(values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


def _python(values: dict[str, Any]) -> str:
    words = {True: "True", False: "False", None: "None"}
    texts = {key: words[value] if value is None or isinstance(value, bool) else _json(value)
             for key, value in values.items()}  # fmt: skip
    return ", ".join(f"{key}={text}" for key, text in texts.items())


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"json": _json, "xml": _xml, "python": _python}


def _answer(
    content: str = "", reasoning: str = "", calls: list[tuple[str, str]] | None = None, **more: Any
) -> ParsedAnswer:
    complete = more.get("is_complete", True)
    return ParsedAnswer(content, reasoning, [ToolCall(name, text, complete) for name, text in calls or []])


def _with_reasoning(answer: ParsedAnswer, reasoning: str) -> ParsedAnswer:
    return ParsedAnswer(answer.content, reasoning, answer.calls)


def _content(name: str, text: str) -> Fixture:
    return Fixture(name, text, _answer(text))


CONTENTS = {
    "plain text": "Hello, you. \n",
    "text with angles": "a < b, <b>bold</b> and <tool_cal",
    "text with brackets": "see [TOOL and [1] | <| <｜tool",
}
_CUT = '{"city": "Be'


def _cut(name: str, text: str, call: tuple[str, str], content: str = "") -> Fixture:
    return Fixture(name, text, _answer(content, calls=[call], is_complete=False))


_H, _E = "<tool_call>\n", "\n</tool_call>"
_C = '{"name": "now", "arguments": {}}'
_NOW = [("now", "{}")]
_DC, _DS, _DE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_M = "<|message|>"
_X, _XE = "<tool_call>\n<function=", "</function>\n</tool_call>"
_R, _A, _CO = "<|channel|>analysis<|message|>", "<|start|>assistant", "<|channel|>commentary"
SPECIAL: dict[str, list[Fixture]] = {
    "hermes": [
        Fixture("cut in the end marker", f"{_H}{_C}\n</tool_c", _answer(calls=_NOW)),
        Fixture("arguments before the name", f'{_H}{{"arguments": {{"a": 1}}, "name": "now"}}{_E}',
                _answer(calls=[("now", '{"a": 1}')])),
        Fixture("arguments as text", f'{_H}{{"name": "now", "arguments": "{{\\"a\\": 1}}"}}{_E}',
                _answer(calls=[("now", '{"a": 1}')])),
        Fixture("no arguments member", f'{_H}{{"name": "now"}}{_E}', _answer(calls=_NOW)),
        Fixture("null as arguments", f'{_H}{{"name": "now", "arguments": null}}{_E}', _answer(calls=_NOW)),
        Fixture("a list in one tag", f"<tool_call>[{_C}, {_C}]</tool_call>", _answer(calls=_NOW * 2)),
        Fixture("one brace too much", f"{_H}{_C}}}{_E} ok", _answer("ok", calls=_NOW)),
        Fixture("one brace too few", f"{_H}{_C[:-1]}{_E}", _answer(calls=_NOW)),
        Fixture("no name", f'{_H}{{"a": 1}}{_E}', _answer(f'{_H}{{"a": 1}}{_E}')),
        Fixture("no JSON", f"{_H}now{_E}", _answer(f"{_H}now{_E}")),
        _cut("cut in the arguments", f'{_H}{{"name": "weather", "arguments": {_CUT}', ("weather", _CUT)),
        _cut("cut after the name", f'{_H}{{"name": "weather", ', ("weather", "")),
        Fixture("cut in the name", f'{_H}{{"name": "wea', _answer(f'{_H}{{"name": "wea')),
        Fixture("white space as written", f'{_H}{{ "name" : "now" , "arguments" : {{ "a" :1}} }}{_E}',
                _answer(calls=[("now", '{ "a" :1}')])),
    ],
    "qwen3_coder": [
        Fixture("cut in the end marker", f"{_X}now>\n</function>\n</tool", _answer(calls=_NOW)),
        _cut("cut in the end of the function", f"{_X}now>\n</func", ("now", "{")),
        Fixture("no outer tag", "<function=now>\n</function>", _answer(calls=_NOW)),
        Fixture("no newlines", "<tool_call><function=weather><parameter=city>Bern</parameter></function></tool_call>",
                _answer(calls=[("weather", '{"city": "Bern"}')])),
        Fixture("unknown parameter is text", f"{_X}now>\n<parameter=x>\n5\n</parameter>\n{_XE}",
                _answer(calls=[("now", '{"x": "5"}')])),
        Fixture("unknown tool", f"{_X}other>\n<parameter=x>\ntrue\n</parameter>\n{_XE}",
                _answer(calls=[("other", '{"x": "true"}')])),
        Fixture("number that is none", "<function=weather>\n<parameter=days>\ntwo\n</parameter>\n</function>",
                _answer(calls=[("weather", '{"days": "two"}')])),
        Fixture("null of a text or null", "<function=weather>\n<parameter=note>\nnull\n</parameter>\n</function>",
                _answer(calls=[("weather", '{"note": null}')])),
        Fixture("no end of the function", "<tool_call>\n<function=now>\n</tool_call>", _answer(calls=_NOW)),
        Fixture("no function", "<tool_call>\nnow</tool_call>", _answer("<tool_call>\nnow</tool_call>")),
        _cut("cut in a text", "<tool_call>\n<function=weather>\n<parameter=city>\nBe", ("weather", '{"city": "Be')),
        _cut("cut in a number", "<function=weather>\n<parameter=days>\n1", ("weather", '{"days": ')),
        Fixture("cut in the name", "<tool_call>\n<function=wea", _answer("<tool_call>\n<function=wea")),
    ],
    "llama3_json": [
        Fixture("with the tag", '<|python_tag|>{"name": "now", "parameters": {}}', _answer(calls=_NOW)),
        Fixture("with arguments", '{"name": "now", "arguments": {"a": 1}}', _answer(calls=[("now", '{"a": 1}')])),
        Fixture("with a type", '{"type": "function", "name": "now", "parameters": {}}', _answer(calls=_NOW)),
        Fixture("white space before", ' \n{"name": "now", "parameters": {}}\n', _answer(calls=_NOW)),
        Fixture("content and the tag", 'Wait. <|python_tag|>{"name": "now", "parameters": {}}',
                _answer("Wait.", calls=_NOW)),
        _content("another object", '{"name": "Bob", "age": 5} is JSON'),
        _content("an object without a name", '{"a": {"name": "now"}}'),
        _content("JSON in the text", 'See {"name": "now", "parameters": {}}'),
        Fixture("code after the tag", "<|python_tag|>print(1)", _answer("print(1)")),
        Fixture("content after", '{"name": "now", "parameters": {}} Done.', _answer("Done.", calls=_NOW)),
        _cut("cut in the arguments", f'{{"name": "weather", "parameters": {_CUT}', ("weather", _CUT)),
        _content("cut in the name", '{"name": "wea'),
    ],
    "pythonic": [
        Fixture("single quotes", "[weather(city='Bern', days=-3)]",
                _answer(calls=[("weather", '{"city": "Bern", "days": -3}')])),
        Fixture("triple quotes", """[weather(city='\''a'b\n"c" '\'')]""",
                _answer(calls=[("weather", '{"city": "a\'b\\n\\"c\\" "}')])),
        Fixture("escapes of Python", r"[weather(city='\x41\u00e9\U0001F642\101\'\d\v\0')]",
                _answer(calls=[("weather", json.dumps({"city": "A\u00e9\U0001f642A'\\d\v\0"}))])),
        Fixture("a surrogate pair", r"[weather(city='\ud83d\ude42')]",
                _answer(calls=[("weather", json.dumps({"city": "\U0001f642"}))])),
        Fixture("white space", ' \n[ weather ( city = "Bern" , ) , now( ) ]\n',
                _answer(calls=[("weather", '{"city": "Bern"}'), ("now", "{}")])),
        Fixture("literals of Python", "[weather(at={'a': [True, None, 1.5,], \"b\": {}}, tags=[], exact=False)]",
                _answer(calls=[("weather", '{"at": {"a": [true, null, 1.5], "b": {}}, "tags": [], "exact": false}')])),
        Fixture("a text without quotes", "[weather(city=San Juan, days=2)]",
                _answer(calls=[("weather", '{"city": "San Juan", "days": 2}')])),
        Fixture("a number for a text", "[weather(city=12)]", _answer(calls=[("weather", '{"city": "12"}')])),
        Fixture("content after", "[now()] Done.", _answer("Done.", calls=_NOW)),
        _content("another function", "[print(1)]"),
        _content("an expression", "[weather(1 + 2)]"),
        _content("a link", "[now](http://x) and [1]"),
        _content("a call in the text", "See [now()]"),
        Fixture("no end of the list", "[now()", _answer(calls=_NOW)),
        _cut("cut in a text", "[weather(city='Be", ("weather", '{"city": "Be')),
        _cut("cut in a number", "[weather(days=1", ("weather", '{"days": ')),
        _cut("a value that is none", "[weather(days=f(1))]", ("weather", '{"days": "f"'), "(1))]"),
        _content("cut in the name", "[wea"),
    ],
    "mistral": [
        Fixture("a list", f"[TOOL_CALLS] [{_C}, {_C}]", _answer(calls=_NOW * 2)),
        Fixture("a list without a space", f"[TOOL_CALLS][{_C}]", _answer(calls=_NOW)),
        Fixture("one object", f"[TOOL_CALLS]{_C}", _answer(calls=_NOW)),
        Fixture("a name", "[TOOL_CALLS]now{}", _answer(calls=_NOW)),
        Fixture("two names", "[TOOL_CALLS]now{}[TOOL_CALLS]now {}", _answer(calls=_NOW * 2)),
        Fixture("an id", "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}", _answer(calls=_NOW)),
        Fixture("no list", "[TOOL_CALLS] [1]", _answer(" [1]")),
        Fixture("an empty list", "[TOOL_CALLS] []", _answer(" []")),
        _cut("cut in the arguments", f"[TOOL_CALLS]weather[ARGS]{_CUT}", ("weather", _CUT)),
        Fixture("cut in the name", "[TOOL_CALLS]wea", _answer("wea")),
    ],
    "deepseek": [
        Fixture("cut in the end marker", f"{_DC}now{_DS}{{}}{_DE[:-1]}", _answer(calls=_NOW)),
        Fixture("cut in the end marker of V3", f"{_DC}function{_DS}now\n```json\n{{}}\n```{_DE[:5]}",
                _answer(calls=_NOW)),
        Fixture("no outer markers", f"{_DC}now{_DS}{{}}{_DE}", _answer(calls=_NOW)),
        Fixture("the other version", f"{_DC}function{_DS}now\n```json\n{{}}\n```{_DE}", _answer(calls=_NOW)),
        Fixture("newlines between", f"{_DC}now{_DS}{{}}{_DE}\n\n{_DC}now{_DS}\n{{}}\n{_DE}", _answer(calls=_NOW * 2)),
        Fixture("no separator", f"{_DC}now{_DE} then", _answer(f"now{_DE} then")),
        Fixture("no arguments", f"{_DC}now{_DS}x{_DE}", _answer(f"now{_DS}x{_DE}")),
        _cut("cut in the arguments", f"{_DC}weather{_DS}{_CUT}", ("weather", _CUT)),
        Fixture("cut in the name", f"{_DC}wea", _answer("wea")),
    ],
    "harmony": [
        Fixture("the final channel", f"<|channel|>final{_M}Hello.\n", _answer("Hello.\n")),
        Fixture("reasoning and content", f"{_R}Hm <b>.<|end|>{_A}<|channel|>final{_M}Hi",
                _answer("Hi", "Hm <b>.")),
        Fixture("two parts of reasoning", f"{_R}A<|end|>{_A}{_R}B<|end|>",
                _answer("", "A\nB")),
        Fixture("reasoning and a call", f"{_R}A<|end|>{_A}{_CO} "
                f"to=functions.now <|constrain|>json{_M}{{}}<|call|>", _answer("", "A", calls=_NOW)),
        Fixture("the tool in the role", f" to=functions.now{_CO} json{_M}{{}}", _answer(calls=_NOW)),
        Fixture("start and role", f"{_A} to=functions.now{_CO} json{_M}{{}}<|call|>",
                _answer(calls=_NOW)),
        Fixture("a preamble", f"{_CO}{_M}I look.<|end|>{_A}{_CO} "
                f"to=functions.now{_M}{{}}<|call|>", _answer("I look.", calls=_NOW)),
        Fixture("two calls", f"{_CO} to=functions.now{_M}{{}}<|call|>{_A}{_CO} "
                f"to=functions.now{_M}{{}}<|call|>", _answer(calls=_NOW * 2)),
        Fixture("another recipient", f"{_CO} to=browser.open{_M}x", _answer("x")),
        _content("no channels", "Hello <|you|>."),
        _cut("cut in the arguments", f"{_CO} to=functions.weather{_M}{_CUT}", ("weather", _CUT)),
        Fixture("cut in the header", "<|channel|>comm", _answer()),
    ],
}  # fmt: skip
