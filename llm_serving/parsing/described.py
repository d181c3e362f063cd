"""Describes tools and their calls as plain text in the messages, for chat templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llm_serving.parsing.formats import NAME, ToolFormat

Message = dict[str, Any]

_INTRODUCTION = (
    "You can call functions. Each line between the tags describes one of them as JSON:\n<tools>\n{tools}\n</tools>\n"
    "To call a function, write its name and its arguments in this form:\n{form}"
)


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[Message]:
    """Returns messages that have only the roles system, user and assistant.

    The system message describes the tools. Earlier calls become part of the assistant's text. Results of tools become
    messages of the user. If a result has images, they are in the field ``parts`` of its message.
    """
    plain: list[Message] = []
    in_results = False
    for message in messages:
        if message["role"] == "tool":
            if in_results:
                _add_result(plain[-1], _result(message))
            else:
                plain.append(_result(message))
            in_results = True
            continue
        in_results = False
        changed = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := message.get("tool_calls"):
            before = f"{changed['content']}\n" if changed.get("content") else ""
            changed["content"] = before + _written(calls, tool_format)
        plain.append(changed)
    if tools:
        _add_to_system(plain, _description(tools, tool_format))
    return plain


def _result(message: Mapping[str, Any]) -> Message:
    """Returns the result of a tool as a message of the user. A result with images has ``parts``."""
    begin, end = "<tool_response>\n", "\n</tool_response>"
    result: Message = {"role": "user", "content": f"{begin}{message['content']}{end}"}
    if "parts" in message:
        result["parts"] = [_text(begin), *message["parts"], _text(end)]
    return result


def _add_result(results: Message, result: Message) -> None:
    """Appends the result of a tool to the message with the results before it."""
    if "parts" in results or "parts" in result:
        first, second = (each.get("parts") or [_text(each["content"])] for each in (results, result))
        results["parts"] = [*first, _text("\n"), *second]
    results["content"] += f"\n{result['content']}"


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _add_to_system(messages: list[Message], text: str) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}".lstrip()
    else:
        messages.insert(0, {"role": "system", "content": text})


def _description(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = _calls([("function_name", {"argument": "value"})], tool_format)
    return _INTRODUCTION.format(tools=lines, form=form)


def _written(calls: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    return _calls([(call["function"]["name"], call["function"]["arguments"]) for call in calls], tool_format)


def _calls(calls: Sequence[tuple[str, Mapping[str, Any]]], tool_format: ToolFormat) -> str:
    """Returns the text of calls in the format that the model uses."""
    texts = [
        tool_format.begin.replace(NAME, name) + _arguments(values, tool_format) + tool_format.end
        for name, values in calls
    ]
    return tool_format.open + tool_format.between.join(texts) + tool_format.close


def _arguments(values: Mapping[str, Any], tool_format: ToolFormat) -> str:
    if tool_format.arguments == "json":
        return json.dumps(values, ensure_ascii=False)
    if tool_format.arguments == "python":
        return ", ".join(f"{key}={one!r}" for key, one in values.items())
    texts = {key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for key, one in values.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
