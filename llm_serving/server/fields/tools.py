"""The fields of tools and reasoning in a chat request, and the members of messages that belong to tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from llm_serving.server.fields.validation import StrictModel, short
from llm_serving.server.http.json_structure import structure_of
from llm_serving.server.limits import (
    MAX_ARGUMENT_VALUES,
    MAX_NAME_CHARS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
)

ToolName = Annotated[str, Field(max_length=MAX_TOOL_NAME_CHARS, pattern="^[a-zA-Z0-9_-]+$")]


def _object_schema(value: object) -> object:
    """Checks that the schema of a tool's arguments describes an object."""
    if isinstance(value, dict) and value.get("type", "object") != "object":
        raise PydanticCustomError(
            "parameters_type", f"has type {short(value['type'])}; arguments are always an object, so write 'object'"
        )
    return value


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: ToolName = Field(description="Name of the function: letters, digits, `_` and `-`.")
    description: str | None = Field(default=None, description="What the function does, for the model.")
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_object_schema)] = Field(
        default=None, description="JSON schema of the arguments (default: no arguments)."
    )
    strict: bool | None = Field(
        default=None,
        description="False: do not enforce the schema. Otherwise the arguments always fit, except for keywords that "
        "the formats `qwen3_coder` and `pythonic` cannot enforce. True: refuse such keywords.",
    )


class Tool(StrictModel):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"}, exclude_none=True)}


def _check_tools(tools: list[Tool]) -> list[Tool]:
    """Checks the number, the names and the size of all tools together."""
    names: dict[str, int] = {}
    for i, tool in enumerate(tools):
        first = names.setdefault(tool.function.name, i)
        if first != i:
            problem = f"holds two tools named {short(tool.function.name)} ([{first}] and [{i}]); give each its own name"
            raise PydanticCustomError("tool_names", problem.replace("{", "{{").replace("}", "}}"))
    size = len(orjson.dumps([tool.for_template() for tool in tools]))
    if size > MAX_TOOLS_BYTES:
        raise PydanticCustomError(
            "tools_size", f"has {size} bytes of JSON; the maximum is {MAX_TOOLS_BYTES}. Send fewer or shorter tools"
        )
    return tools


Tools = Annotated[
    list[Tool] | None, Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(lambda v: v and _check_tools(v))
]


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The ``tool_choice`` of one function, which the model must call."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def _tool_choice(value: object) -> object:
    """Returns ``tool_choice``: ``auto``, ``none``, ``required``, a ``NamedTool``, or None without the field."""
    if value is None or value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and value.keys() == {"type", "function"}:
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return NamedTool(function["name"])
    raise PydanticCustomError(
        "tool_choice",
        "should be 'auto', 'none', 'required' or {form}",
        {"form": '{"type": "function", "function": {"name": ...}}'},
    )


class ToolFields(StrictModel):
    """The fields of tools and reasoning in a chat request."""

    tools: Tools = Field(default=None, description="Functions that the model may call.")
    tool_choice: Annotated[
        Any,
        BeforeValidator(_tool_choice),
        WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}, {"type": "null"}]}),
    ] = Field(
        default=None,
        description="`auto`: the model decides. `none`: no calls. `required`: at least one. Or one function.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: at most one tool call (default: any number)."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None,
        description="How long the model reasons. `none`: not at all. No effect on models without reasoning.",
    )
    thinking_token_budget: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Maximum number of tokens of the reasoning, which then ends."
    )


class CalledFunction(StrictModel):
    """The function and the arguments of an earlier tool call."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    arguments: Annotated[str, AfterValidator(lambda text: _check_arguments(text))]


class EarlierCall(StrictModel):
    """A tool call in an earlier message of the assistant."""

    ignored = frozenset({"index"})

    id: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect, with the arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        return {"id": self.id, "type": "function", "function": function}


def check_argument_values(texts: Sequence[str]) -> None:
    """Raises PydanticCustomError if JSON texts have more than ``MAX_ARGUMENT_VALUES`` values and keys together."""
    if sum(map(len, texts)) <= MAX_ARGUMENT_VALUES:  # each value has at least one character
        return
    structures = [structure_of(text.encode()) for text in texts]
    number = sum(each.num_values + each.num_keys for each in structures)
    if number > MAX_ARGUMENT_VALUES:
        problem = f"holds {number} values and keys in arguments of tool calls; the maximum is {MAX_ARGUMENT_VALUES}"
        raise PydanticCustomError("arguments_size", problem)


def _check_arguments(text: str) -> str:
    check_argument_values([text])
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments_json", "should be the text of a JSON object")
    return text


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose calls have their arguments as JSON text, for templates that expect text."""
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": _compact(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
