"""The parsers of tool calls: one function for each format in which models write calls.

Each function is a generator that reads the text after the reasoning, to the end of the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llm_serving.parsing.json_text import pass_value, read_calls
from llm_serving.parsing.parameters import as_json, is_text
from llm_serving.parsing.python_calls import read_python_calls
from llm_serving.parsing.reader import SPACE, Reader, Steps, expect, expect_end, pass_until, peek, skip

CALL, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The properties of a request's tools that a parser must know."""

    types: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    """The JSON types of each tool's parameters. The outer keys are tool names, and the inner keys parameter names."""
    reads_calls: bool = True
    """False if the request has no tools. Text that looks like a call is then content."""


CallParser = Callable[[Reader, CallOptions], Steps[None]]


def plain(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads all text as content. For models or requests without tool calls."""
    yield from pass_until(reader, (), reader.content)


def hermes(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads calls of the form ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    A pair of tags may also enclose a list of calls.
    """
    while (yield from pass_until(reader, (CALL,), reader.content)) is not None:
        reader.record = [CALL]
        yield from skip(reader)
        if (yield from read_calls(reader)):
            yield from skip(reader, SPACE + "}")  # some models write one closing brace too many
            yield from expect_end(reader, CALL_CLOSE)


def llama3_json(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads calls of the form ``{"name": ..., "parameters": {...}}``, at the start of the text or after
    ``<|python_tag|>``.

    Semicolons separate several calls. If the name in the JSON is not a tool of the request, the JSON is content.
    """
    reader.record = []
    yield from skip(reader)
    if (yield from peek(reader)) == "{":
        yield from _calls_with_semicolons(reader, options)
    else:
        reader.content(reader.recorded())
    while (yield from pass_until(reader, (PYTHON_TAG,), reader.content)) is not None:
        reader.record = []
        yield from skip(reader)
        if (yield from peek(reader)) == "{":
            yield from _calls_with_semicolons(reader, options)
        else:
            reader.content(reader.recorded())


def _calls_with_semicolons(reader: Reader, options: CallOptions) -> Steps[None]:
    while (yield from read_calls(reader, options.types.keys())):
        reader.record = []
        yield from skip(reader)
        if (yield from expect(reader, ";")) is None:
            reader.content(reader.recorded())
            return
        yield from skip(reader)
        if (yield from peek(reader)) != "{":
            reader.content(reader.recorded())
            return


def mistral(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads Mistral's calls, which follow the marker ``[TOOL_CALLS]``.

    They have one of three forms: a JSON list of objects, ``name{...}``, or ``name[CALL_ID]id[ARGS]{...}``.
    """
    marker = yield from pass_until(reader, (MISTRAL_CALLS,), reader.content)
    while marker is not None:
        reader.record = []
        yield from skip(reader)
        if (yield from peek(reader)) in ("[", "{"):
            yield from read_calls(reader)
        else:
            yield from _named_call(reader)
        marker = yield from pass_until(reader, (MISTRAL_CALLS,), reader.content)


def _named_call(reader: Reader) -> Steps[None]:
    """Reads a call in which the name comes before the JSON of the arguments."""
    name: list[str] = []
    marker = yield from pass_until(reader, ("{", MISTRAL_ID, MISTRAL_ARGUMENTS), name.append)
    if marker == MISTRAL_ID:
        marker = yield from pass_until(reader, ("{", MISTRAL_ARGUMENTS), _ignore)
    if marker == MISTRAL_ARGUMENTS:
        yield from skip(reader)
    elif marker == "{":
        reader.put_back("{")
    if (yield from peek(reader)) != "{":
        reader.content(reader.recorded())
        return
    yield from _call_with_arguments(reader, "".join(name).strip())


def _call_with_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Reads the arguments of a call of the tool ``name``. Returns True if the arguments are complete."""
    reader.begin_call(name)
    if (yield from pass_value(reader, reader.arguments)):
        reader.end_call()
        return True
    return False


def deepseek(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads DeepSeek's calls. V3 writes the arguments as a Markdown code block, V3.1 directly after the tool's name."""
    marker = yield from pass_until(reader, (DEEPSEEK_CALLS, DEEPSEEK_CALL), reader.content)
    while marker is not None:
        if marker == DEEPSEEK_CALLS:
            yield from skip(reader)
            if (yield from expect(reader, DEEPSEEK_CALL)) is not None:
                marker = DEEPSEEK_CALL
        if marker == DEEPSEEK_CALL:
            yield from _deepseek_call(reader)
        marker = yield from pass_until(reader, (DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_CALLS_CLOSE), reader.content)


def _deepseek_call(reader: Reader) -> Steps[None]:
    head: list[str] = []
    reader.record = []
    marker = yield from pass_until(reader, (DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_CLOSE), head.append)
    if marker == DEEPSEEK_SEPARATOR:
        yield from skip(reader)
        if (yield from peek(reader)) != "{":
            head.clear()
            yield from pass_until(reader, ("\n",), head.append)
            yield from skip(reader)
            yield from expect(reader, "```json")
            yield from skip(reader)
    if (yield from peek(reader)) != "{":
        reader.content(reader.recorded())
        return
    yield from _call_with_arguments(reader, "".join(head).strip())
    yield from skip(reader)
    if (yield from expect_end(reader, "```", DEEPSEEK_CALL_CLOSE)) == "```":
        yield from skip(reader)
        yield from expect_end(reader, DEEPSEEK_CALL_CLOSE)


def qwen3_coder(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads calls of the form ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    The values have no quotes, so the tool's schema decides which values are text.
    """
    marker = yield from pass_until(reader, (CALL, "<function="), reader.content)
    while marker is not None:
        reader.record = [marker]
        if marker == CALL:
            yield from skip(reader)
            marker = yield from expect(reader, "<function=")
        if marker is None:
            reader.content(reader.recorded())
        else:
            yield from _function(reader, options)
        marker = yield from pass_until(reader, (CALL, "<function="), reader.content)


def _function(reader: Reader, options: CallOptions) -> Steps[None]:
    name: list[str] = []
    if (yield from pass_until(reader, (">",), name.append)) is None:
        reader.content(reader.recorded())
        return
    tool = "".join(name).strip()
    reader.begin_call(tool)
    reader.arguments("{")
    types = options.types.get(tool, {})
    separator = ""
    while True:
        yield from skip(reader)
        if (yield from expect(reader, "<parameter=")) is None:
            break
        key: list[str] = []
        if (yield from pass_until(reader, (">",), key.append)) is None:
            return
        parameter = "".join(key).strip()
        reader.arguments(f"{separator}{json.dumps(parameter, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from _parameter(reader, types.get(parameter, frozenset()))):
            return
    closed = yield from expect_end(reader, "</function>", CALL_CLOSE)
    if closed is None and not (yield from peek(reader)):
        return
    reader.arguments("}")
    reader.end_call()
    if closed == "</function>":
        yield from skip(reader)
        yield from expect_end(reader, CALL_CLOSE)


def _parameter(reader: Reader, types: frozenset[str]) -> Steps[bool]:
    """Reads the value of a parameter. Returns True if the value is complete. ``types`` are the JSON types of the
    parameter.

    One newline at the start of the value and one at its end do not belong to the value.
    """
    yield from expect(reader, "\n")
    if not is_text(types):
        value: list[str] = []
        marker = yield from pass_until(reader, ("</parameter>",), value.append)
        if marker is not None:
            reader.arguments(as_json("".join(value).removesuffix("\n"), types))
        return marker is not None
    text = _Quoted(reader)
    reader.arguments('"')
    marker = yield from pass_until(reader, ("</parameter>",), text.add)
    if marker is not None:
        reader.arguments('"')
    return marker is not None


class _Quoted:
    """Adds the text of a parameter value to the arguments of the call that is being read, escaped as the inside of a
    JSON string.

    Leaves out a newline at the end of the value.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._reader.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def harmony(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads the messages of gpt-oss. The header of a message names its channel, or the tool that receives the message.

    The channel ``analysis`` is reasoning, and other channels are content. The prompt already has the beginning of the
    first message's header. So the generated text begins in the middle of this header.
    """
    while True:
        reader.record = []
        yield from skip(reader)
        if (yield from expect(reader, START, CHANNEL, "assistant", "to=")) is None:
            reader.content(reader.recorded())  # text without the header of a message is content
            marker = yield from pass_until(reader, (*HARMONY_ENDS, START), reader.content)
        else:
            marker = yield from _message(reader, options)
        if marker is None:
            return


def _message(reader: Reader, options: CallOptions) -> Steps[str | None]:
    """Reads a message whose header has begun. Returns the marker at the end of the message, or None if the text has
    ended.
    """
    head = [reader.recorded()]
    marker = yield from pass_until(reader, (MESSAGE, *HARMONY_ENDS), head.append)
    if marker != MESSAGE:
        return marker
    role, _, channel = "".join(head).rpartition(CHANNEL)
    recipient = _RECIPIENT.search(role) or _RECIPIENT.search(channel)
    ends = (*HARMONY_ENDS, START)
    if recipient is not None and recipient[1].startswith(_FUNCTIONS) and options.reads_calls:
        yield from skip(reader)
        yield from _call_with_arguments(reader, recipient[1].removeprefix(_FUNCTIONS))
        return (yield from pass_until(reader, ends, _ignore))
    if channel.strip().startswith("analysis"):
        marker = yield from pass_until(reader, ends, reader.reasoning)
        reader.end_reasoning()
        return marker
    return (yield from pass_until(reader, ends, reader.content))


def pythonic(reader: Reader, options: CallOptions) -> Steps[None]:
    """Reads calls of the form ``[name(key="text", other=3), name()]`` at the start of the text."""
    reader.record = []
    yield from skip(reader)
    yield from read_python_calls(reader, options.types)
    yield from pass_until(reader, (), reader.content)


def _ignore(text: str) -> None:
    """Drops a text. Used as the destination of text that is neither content nor arguments."""
