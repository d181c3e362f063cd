"""Grammars of answers with reasoning and tool calls, in llguidance's dialect of Lark.

A grammar has rules for the reasoning, for the calls of each tool, and for the content. Special tokens appear by id, so
that ordinary tokens with the same text do not match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from llm_serving.constraints.grammar import (
    COMPOSED,
    JSON_SCHEMA,
    JSON_WHITESPACE,
    MAX_COMPOSED_BYTES,
    REGEX,
    Grammar,
)
from llm_serving.constraints.schema_keywords import mentions, rewritten
from llm_serving.parsing.calls import CHANNEL, HARMONY_ENDS, MESSAGE, START
from llm_serving.parsing.formats import NAME, ReasoningFormat, ToolFormat
from llm_serving.parsing.parameters import STRING, json_types, resolve

_TEXT = r"/(.|\n)*/"
_ONE_SPACE = r"\x20"
"""Regular expression of the white space between the parts of JSON arguments. It allows a single space, because small
models may repeat white space endlessly.
"""
_COMMENTS = frozenset({"type", "title", "description", "default", "examples", "deprecated"})
_SEPARATE_KEYS = _COMMENTS | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
"""Keywords of a tool's schema that limit each parameter on its own."""
_OPEN_KEYS = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "patternProperties"}
)
"""Keywords that may describe parameters that ``properties`` does not list."""
_EMPTY = '""'
"""The expression of an empty text in a grammar."""
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class UnsupportedToolError(Exception):
    """The schema of a tool's arguments cannot be enforced in the model's format. ``index`` is the index of the tool."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class LongGrammarError(Exception):
    """The grammar of an answer would have more than ``MAX_COMPOSED_BYTES`` bytes."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """The properties of a tool that determine its grammar. If ``is_strict`` is False, the arguments may be any JSON
    object.
    """

    name: str
    parameters: Mapping[str, Any] | None
    is_strict: bool = True
    is_lenient: bool = False
    """Whether the grammar leaves out keywords that the model's format cannot enforce. If False, they are an error."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning before an answer. ``is_open`` is True if the prompt ends within the reasoning."""

    format: ReasoningFormat
    is_open: bool


def answer_grammar(
    special: Mapping[str, int],
    *,
    thinking: Thinking | None = None,
    tool_format: ToolFormat | None = None,
    tools: Sequence[CallableTool] = (),
    is_required: bool = False,
    is_parallel: bool = True,
    content: Grammar | None = None,
) -> Grammar:
    """Returns the grammar of an answer: the reasoning, then calls of ``tools`` or content.

    ``special`` has the ids of special tokens by text. ``is_required``: the answer must have a call. ``is_parallel``:
    the answer may have several calls. ``content`` is the grammar of an answer without calls, or None for any text.
    Raises UnsupportedToolError if the schema of a tool cannot be enforced, and LongGrammarError if the grammar is too
    long.
    """
    rules = _Rules(special)
    if tool_format is not None and tools:
        after = _add_calls(rules, tool_format, tools, is_parallel)
        if not is_required and content is None and not tool_format.trigger and not tool_format.starts_with:
            _add_messages(rules)
            return rules.grammar()
        if not is_required and content is None:
            if tool_format.starts_with:
                _add_free_text_or_bracket(rules, tool_format, thinking, tools)
            else:
                _add_free_text(rules, tool_format, thinking, is_parallel)
            return rules.grammar()
        body = after if is_required or content is None else f"({after} | {rules.sub_grammar(content)})"
    else:
        assert content is not None
        body = rules.sub_grammar(content)
        if thinking is not None and thinking.format.is_in_channels:
            body = f"{rules.literal(f'{CHANNEL}final{MESSAGE}')} {body}"
    rules.add("start", f"{_add_thinking(rules, thinking)}{body}")
    return rules.grammar()


class _Rules:
    """Collects the rules of one grammar, and other grammars to which these rules refer."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None
        self._lines = ["%llguidance {}"]
        self._others: list[dict[str, Any]] = []
        self._num_chars = 0

    def add(self, name: str, body: str) -> None:
        """Adds a rule. Raises LongGrammarError if the rules together are too long."""
        self._num_chars += len(body)
        if self._num_chars > MAX_COMPOSED_BYTES:
            raise LongGrammarError
        self._lines.append(f"{name}: {body}")

    def is_special(self, text: str) -> bool:
        return text in self._special

    def literal(self, text: str) -> str:
        """Returns the expression of a fixed text. Special tokens in the text appear by id."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def one_of(self, texts: Sequence[str]) -> str:
        """Returns the expression of any one of several fixed texts."""
        return self.literal(texts[0]) if len(texts) == 1 else f"({' | '.join(map(self.literal, texts))})"

    def sub_grammar(self, grammar: Grammar) -> str:
        """Adds another grammar, and returns the expression that refers to it in a rule."""
        if grammar.kind == JSON_SCHEMA:
            return _json(json.loads(grammar.text), JSON_WHITESPACE)
        name = f"other{len(self._others)}"
        if grammar.kind == REGEX:
            [one] = json.loads(llguidance.LLMatcher.grammar_from_regex(grammar.text))["grammars"]
        else:
            one = {"lark_grammar": grammar.text}
        self._others.append({**one, "name": name})
        return f"@{name}"

    def grammar(self) -> Grammar:
        grammars = [{"name": "answer", "lark_grammar": "\n".join(self._lines) + "\n"}, *self._others]
        return Grammar(COMPOSED, json.dumps({"grammars": grammars}, ensure_ascii=False))


def _json(schema: Mapping[str, Any], whitespace: str = _ONE_SPACE) -> str:
    options = {"whitespace_pattern": whitespace, "lenient": False}
    return f"%json {json.dumps({**rewritten(schema), 'x-guidance': options}, ensure_ascii=False)}"


def _add_thinking(rules: _Rules, thinking: Thinking | None) -> str:
    """Adds the rule of the reasoning. Returns the expression for the reasoning at the start of an answer, empty without
    reasoning.
    """
    if thinking is None:
        return ""
    opening, close = thinking.format.open, thinking.format.close
    if rules.is_special(close):
        rules.add("THOUGHT", _TEXT)
        rules.add("thought_end", f"THOUGHT {rules.literal(close)}")
    else:
        rules.add("thought_end[lazy]", f"{_TEXT} {rules.literal(close)}")
    rules.add("gap", r"/\n{0,4}/")
    between = rules.literal(f"{START}assistant") if thinking.format.is_in_channels else "gap"
    if thinking.is_open:
        return f"thought_end {between} "
    rules.add("thinking", f"{rules.literal(opening)} thought_end {between}")
    return "thinking? "


def _add_calls(rules: _Rules, tool_format: ToolFormat, tools: Sequence[CallableTool], is_parallel: bool) -> str:
    """Adds one rule for each tool. Also adds the rule for all calls of an answer, which includes the markers before,
    between and after the calls. Returns the name of this rule.
    """
    for i, tool in enumerate(tools):
        identifier = f"/{tool_format.id_pattern}/ " if tool_format.id_pattern else ""
        identifier += rules.literal(tool_format.after_id)
        begins = (_without_trigger(tool_format, tool_format.begin), *tool_format.other_begins)
        begin = rules.one_of([each.replace(NAME, tool.name) for each in begins])
        extra = f"/{tool_format.extra_pattern}/?" if tool_format.extra_pattern else ""
        rules.add(f"body{i}", f"{identifier} {_arguments(rules, i, tool, tool_format)} {extra} "
                  f"{rules.literal(tool_format.end)}")  # fmt: skip
        rules.add(f"call{i}", f"{begin} body{i}")
    rules.add("call", " | ".join(f"call{i}" for i in range(len(tools))))
    first = _prefix(tool_format)
    again = f"({rules.literal(tool_format.between + first)} call)*" if is_parallel and tool_format.is_parallel else ""
    opening = rules.one_of([text + first for text in (tool_format.open, *tool_format.other_opens)])
    rules.add("later", f"{again} {rules.literal(tool_format.close)}")
    rules.add("calls", f"{opening} call later")
    return "calls"


def _prefix(tool_format: ToolFormat) -> str:
    """Returns the format's trigger, the text at which calls start, if every call begins with it. Otherwise returns "".
    """
    return tool_format.trigger if tool_format.trigger and tool_format.begin.startswith(tool_format.trigger) else ""


def _without_trigger(tool_format: ToolFormat, begin: str) -> str:
    return begin[len(_prefix(tool_format)) :]


def _add_free_text(rules: _Rules, tool_format: ToolFormat, thinking: Thinking | None, is_parallel: bool) -> None:
    """Adds the rule of an answer with free text. The format's trigger ends the free text and starts calls."""
    trigger = tool_format.trigger
    if _prefix(tool_format):
        rules.add("region", "call")
    else:
        again = f"({rules.literal(tool_format.between)} call)*" if is_parallel else ""
        rest = rules.one_of([text[len(trigger) :] for text in (tool_format.open, *tool_format.other_opens)])
        rules.add("region", f"{rest} call {again} {rules.literal(tool_format.close)}")
    rules.add("TEXT", _TEXT)
    rules.add("tag", _after_trigger(rules, "tag", "TEXT", trigger))
    rules.add("end", "TEXT")
    rules.add("SPACE_AT_END", r"/\s{0,8}/")
    tail = "tag* end" if is_parallel and tool_format.is_parallel else "tag SPACE_AT_END | end"
    rules.add("tail", tail)
    if thinking is None or thinking.is_open or rules.is_special(thinking.format.open):
        rules.add("start", f"{_add_thinking(rules, thinking)}tail")
        return
    # The rule FIRST excludes text that begins with the opening marker of the reasoning. Otherwise, the reasoning would
    # match this rule, and a trigger within the reasoning would start a call.
    opening = re.escape(thinking.format.open).replace("/", r"\/")
    rules.add("FIRST", f"{_TEXT} & ~/\\s*{opening}(.|\\n)*/")
    rules.add("first", _after_trigger(rules, "first", "FIRST", trigger))
    rules.add("only", "FIRST")
    rules.add("thought[lazy]", f"/\\s*{opening}/ {_TEXT} {rules.literal(thinking.format.close)}")
    rest = "first tail" if is_parallel and tool_format.is_parallel else "first SPACE_AT_END"
    rules.add("start", f"thought tail | {rest} | only")


def _after_trigger(rules: _Rules, name: str, text: str, trigger: str) -> str:
    """Returns the expression of free text, the trigger and the calls, in this order.

    ``text`` names the rule of the free text. The caller defines the rule ``region``, which matches the calls. If the
    trigger is not a special token, the free text ends at the first occurrence of the trigger (lazy).
    """
    if rules.is_special(trigger):
        return f"{text} {rules.literal(trigger)} region"
    rules.add(f"{name}_start[lazy]", f"{text} {rules.literal(trigger)}")
    return f"{name}_start region"


def _add_messages(rules: _Rules) -> None:
    """Adds the rule of an answer of gpt-oss: messages in channels, and at the end a final message or a call.

    A message contains any text. A header that names a tool as its recipient starts a call.
    """
    opening, end = rules.literal(CHANNEL), rules.literal(f"{HARMONY_ENDS[0]}{START}assistant")
    rules.add("TEXT", _TEXT)
    rules.add("message", f'{opening} ("analysis" | "commentary") {rules.literal(MESSAGE)} TEXT {end}')
    rules.add("final", f"{rules.literal(f'{CHANNEL}final{MESSAGE}')} TEXT")
    rules.add("start", "message* (final | call)")


def has_free_text(tool_format: ToolFormat, special: Mapping[str, int]) -> bool:
    """Returns True if a grammar can constrain the calls in an answer that may also be free text.

    In a format with channels, the markers of messages must be special tokens. Ordinary text could also occur in free
    text, so the grammar could not find the markers.
    """
    if tool_format.trigger or tool_format.starts_with:
        return True
    return all(marker in special for marker in (CHANNEL, MESSAGE, START, HARMONY_ENDS[0]))


def _add_free_text_or_bracket(
    rules: _Rules, tool_format: ToolFormat, thinking: Thinking | None, tools: Sequence[CallableTool]
) -> None:
    """Adds the rule of an answer that is a call if it begins with the format's bracket, and free text otherwise.

    A square bracket is also common in free text. It only starts a call if the name of a tool follows.
    """
    calls = "calls"
    if tool_format.starts_with == "{":
        rules.add("PLAIN", r"/([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/")
    else:
        # The start of a call is one terminal, because the lexer takes the longest terminal, and PLAIN is also a match.
        names = [re.escape(tool.name) for tool in tools]
        for i, name in enumerate(names):
            rules.add(f"START{i}", rf"/\s*\[\s*{name}\(/")
        rules.add("PLAIN", rf"{_TEXT} & ~/\s*\[\s*({'|'.join(names)})\s*\((.|\n)*/")
        rules.add("bracketed", " | ".join(f"START{i} body{i} later" for i in range(len(names))))
        calls = "bracketed"
    tagged = f" | PLAIN {rules.literal(tool_format.trigger)} calls" if rules.is_special(tool_format.trigger) else ""
    rules.add("plain", "PLAIN")
    rules.add("start", f"{_add_thinking(rules, thinking)}(plain | {calls}{tagged})")


def _arguments(rules: _Rules, index: int, tool: CallableTool, tool_format: ToolFormat) -> str:
    """Returns the grammar expression of a tool's arguments."""
    schema = tool.parameters
    if schema is None:
        schema = _NO_ARGUMENTS
    if tool_format.arguments == "xml":
        return _xml_arguments(rules, index, schema, tool)
    if tool_format.arguments == "python":
        return _python_arguments(rules, index, schema, tool)
    if not tool.is_strict:
        return _json({"type": "object"})
    return _json(
        schema if schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"} else {"type": "object", **schema}
    )


def _xml_arguments(rules: _Rules, index: int, schema: Mapping[str, Any], tool: CallableTool) -> str:
    """Returns the expression of arguments in tags, one tag for each parameter, in the order of the schema.

    If the tool is not strict, the parameters may have any names and values. Raises UnsupportedToolError.
    """
    close = json.dumps("\n</parameter>\n")
    if not tool.is_strict or (tool.is_lenient and _has_other_parameters(schema)):
        rules.add(f"any{index}[lazy]", f"{_TEXT} {close}")
        rules.add(f"many{index}", f'("<parameter=" /[^>\\n]+/ ">\\n" any{index})*')
        return f"many{index}"
    properties, needed = _parameters(index, schema, tool)
    parts = []
    for i, (name, one) in enumerate(properties.items()):
        if not _is_written(index, name, tool, r"[^>\n]*"):
            continue
        value = f"value{index}_{i}"
        if not tool.is_lenient:
            _check_value(index, one, schema)
        if _add_value(rules, value, one, schema, close):
            value += f" {close}"
        rules.add(f"parameter{index}_{i}", f"{rules.literal(f'<parameter={name}>' + chr(10))} {value}")
        parts.append(f"parameter{index}_{i}" + ("" if name in needed else "?"))
    return " ".join(parts)


def _parameters(index: int, schema: Mapping[str, Any], tool: CallableTool) -> tuple[Mapping[str, Any], set[str]]:
    """Returns the schemas of a tool's parameters by name, and the names of those that a call must have.

    Raises UnsupportedToolError if the schema limits the parameters together, for example their number.
    """
    if not tool.is_lenient and (unknown := sorted(schema.keys() - _SEPARATE_KEYS)):
        raise UnsupportedToolError(index, f"the keyword {unknown[0]!r} cannot be enforced in the format of this model")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UnsupportedToolError(index, "'properties' must be an object, and 'required' a list")
    return properties, {one for one in required if isinstance(one, str)}


def _is_written(index: int, name: str, tool: CallableTool, pattern: str) -> bool:
    """Returns whether the model's format can write the name of a parameter: whether it matches ``pattern``.

    If the tool is not lenient, raises UnsupportedToolError instead of returning False.
    """
    if re.fullmatch(pattern, name):
        return True
    if tool.is_lenient:
        return False
    raise UnsupportedToolError(index, f"the name {name!r} cannot be written in the format of this model")


def _python_arguments(rules: _Rules, index: int, schema: Mapping[str, Any], tool: CallableTool) -> str:
    """Returns the expression of keyword arguments, in the order of the schema.

    The values are JSON, except ``True``, ``False`` and ``None``. If the tool is not strict, the parameters may have any
    names and values. Raises UnsupportedToolError.
    """
    if not tool.is_strict or (tool.is_lenient and _has_other_parameters(schema)):
        rules.add(f"any{index}", f'{_json({})} | "True" | "False" | "None"')
        rules.add(f"one{index}", f'/[A-Za-z_][A-Za-z0-9_]*/ "=" any{index}')
        return f'(one{index} (", " one{index})*)?'
    properties, needed = _parameters(index, schema, tool)
    properties = {name: one for name, one in properties.items() if _is_written(index, name, tool, r"[^\W\d]\w*")}
    if not properties:
        return ""
    for i, (name, one) in enumerate(properties.items()):
        words = {"boolean": '"True" | "False"', "null": '"None"'}
        types = json_types(one, schema)
        resolved = resolve(one, schema)
        has_values = isinstance(resolved, Mapping) and bool({"enum", "const"} & resolved.keys())
        is_word = len(types) == 1 and types <= words.keys() and not has_values
        whole = _with_definitions(one, schema) if isinstance(one, Mapping) else {}
        value = words[min(types)] if is_word else _json(whole)
        rules.add(f"value{index}_{i}", value)
        rules.add(f"parameter{index}_{i}", f'{rules.literal(name + "=")} value{index}_{i}')
    # The rules ``first`` match the parameters from one index on. The rules ``rest`` match them after a parameter.
    for i, name in reversed(list(enumerate(properties))):
        is_last = i == len(properties) - 1
        first, rest = ("", "") if is_last else (f"first{index}_{i + 1}", f"rest{index}_{i + 1}")
        this, skipped = f"parameter{index}_{i} {rest}", name not in needed
        rules.add(f"first{index}_{i}", this + (f' | {first or _EMPTY}' if skipped else ""))
        rules.add(f"rest{index}_{i}", f'", " {this}' + (f' | {rest or _EMPTY}' if skipped else ""))
    return f"first{index}_0"


def _has_other_parameters(schema: Mapping[str, Any]) -> bool:
    """Returns True if arguments may have parameters that ``properties`` does not list."""
    return bool(schema.keys() & _OPEN_KEYS) or (
        not schema.get("properties") and schema.get("additionalProperties", False) is not False
    )


def _add_value(rules: _Rules, name: str, schema: object, root: Mapping[str, Any], close: str) -> bool:
    """Adds the rule of a parameter's value. Returns False if this rule also includes ``close``, the text after the
    value.
    """
    schema = resolve(schema, root)
    types = json_types(schema, root)
    if isinstance(schema, Mapping) and types and STRING not in types:
        rules.add(name, _json(_with_definitions(schema, root)))
        return True
    if texts := _choices(schema, types):
        rules.add(name, " | ".join(rules.literal(text) or '""' for text in texts))
        return True
    rules.add(f"{name}[lazy]", f"{_TEXT} {close}")
    return False


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a parameter with the definitions of ``root``, the tool's schema, if it refers to them."""
    has_references = mentions(schema, "$ref")
    return {**schema, **{key: root[key] for key in ("$defs", "definitions") if has_references and key in root}}


def _choices(schema: object, types: frozenset[str]) -> list[str]:
    """Returns the texts of a parameter that must be one of several texts. Returns [] for any other parameter."""
    if not isinstance(schema, Mapping) or types != {STRING}:
        return []
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []


def _check_value(index: int, schema: object, root: Mapping[str, Any]) -> None:
    """Raises UnsupportedToolError if the schema of a parameter limits its text, for example its length.

    The model writes a text without quotes. The grammar then allows any text, or the texts of ``enum`` or ``const``.
    """
    schema = resolve(schema, root)
    types = json_types(schema, root)
    if isinstance(schema, Mapping) and (not types or STRING in types):
        choices = {"enum" if "enum" in schema else "const"} if _choices(schema, types) else set()
        _check_text(index, schema, _COMMENTS | choices)


def _check_text(index: int, schema: object, allowed: frozenset[str]) -> None:
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in ("anyOf", "oneOf") and isinstance(value, list):
            for one in value:
                _check_text(index, one, _COMMENTS)
        elif key not in allowed:
            raise UnsupportedToolError(index, f"the keyword {key!r} cannot be enforced in the format of this model")
