"""Converts a request of Anthropic's API to a chat request. Restores Anthropic's field names in its errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, ClassVar

import orjson
from pydantic import ValidationError

from llm_serving.errors import RequestError
from llm_serving.server.fields.images import ImageField, image_part, joined, text_part
from llm_serving.server.fields.neighbours import join_neighbours
from llm_serving.server.fields.renamed import renamed
from llm_serving.server.fields.validation import request_error, short
from llm_serving.server.generation.scheduling import SchedulingFields
from llm_serving.server.generation.work import call_entries
from llm_serving.server.messages.fields import (
    ConversationFields,
    ImageAddress,
    ImageBlock,
    ImageData,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from llm_serving.server.openai.chat import ChatRequest

_FIELDS = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format", "output_config.format"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"stop\b", "stop_sequences"),
)
"""Renames fields of the chat request to fields of Anthropic's API, for errors.

Each pair has a pattern for a field of the chat request, and the name of the Anthropic field that it came from.
"""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn the reasoning on and off."""


class MessagesChat(ChatRequest):
    """The chat request to which a request of Anthropic's API is converted.

    Anthropic's clients do not know the model's context, and always send a large ``max_tokens``, for example 32,000.
    Therefore a ``max_tokens`` that exceeds the context is reduced and not refused.
    """

    fits_output: ClassVar[bool] = True


def num_entries(body: ConversationFields) -> int:
    """Returns the cost of ``chat_request``: about the number of messages and blocks that it converts.

    A tool call with long arguments counts as several blocks.
    """
    blocks = chain.from_iterable(message.content for message in body.messages)
    return len(body.messages) + len(body.system or ()) + sum(map(_block_entries, blocks))


def _block_entries(block: object) -> int:
    if isinstance(block, ToolUseBlock):
        return call_entries(len(orjson.dumps(block.input)))
    return 1 + len(block.content) if isinstance(block, ToolResultBlock) else 1


def chat_request(body: ConversationFields, known_variables: tuple[str, ...]) -> MessagesChat:
    """Converts ``body`` to a chat request with the same meaning. Raises RequestError.

    ``known_variables`` are the variables of the chat template that control the reasoning.
    """
    chat: dict[str, Any] = {name: getattr(body, name) for name in SchedulingFields.model_fields}
    chat |= {"model": body.model, "messages": chat_messages(body)}
    if body.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    chat |= _choice_fields(body) | _thinking_fields(body, known_variables)
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.json_schema
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        chat["stop"] = list(body.stop)
    try:
        return MessagesChat.model_validate({name: value for name, value in chat.items() if value is not None})
    except ValidationError as error:
        raise named_back(request_error(error)) from None


_CONTENT = r"(messages\[\d+\]\.content\[\d+\])"
_TYPE = r"\.(?:text|image|thinking|tool_use|tool_result)"
_SOURCE = r"\.source(?:\.(?:base64|url))?"
_TAGS = (
    (rf"{_CONTENT}{_TYPE}(\.content\[\d+\]){_TYPE}{_SOURCE}\b", r"\1\2.source"),
    (rf"{_CONTENT}{_TYPE}(\.content\[\d+\]){_TYPE}\b", r"\1\2"),
    (rf"{_CONTENT}{_TYPE}{_SOURCE}\b", r"\1.source"),
    (rf"{_CONTENT}{_TYPE}\b", r"\1"),
)
"""Removes the types of blocks from the locations that pydantic reports: ``content[0].text`` becomes ``content[0]``.

Each pair has a pattern for pydantic's location, and its replacement.
"""


def without_tags(error: RequestError) -> RequestError:
    """Returns ``error`` with the location of the field in the client's request.

    pydantic adds the types of blocks to the location, for example in ``content[0].text``. This function removes them.
    """
    return renamed(error, _TAGS)


def named_back(error: RequestError) -> RequestError:
    """Returns an error of the converted chat request, with the names of the fields in Anthropic's API."""
    return renamed(error, _FIELDS)


def image_fields(body: ConversationFields) -> list[ImageField]:
    """Returns the names of the fields of each image in ``body``, in the order of the images in the chat."""
    fields = []
    for i, message in enumerate(body.messages):
        for j, block in enumerate(message.content):
            where = f"messages[{i}].content[{j}]"
            inner = block.content if isinstance(block, ToolResultBlock) else ()
            named = [(where, block), *((f"{where}.content[{k}]", each) for k, each in enumerate(inner))]
            for name, each in named:
                if isinstance(each, ImageBlock):
                    member = "data" if isinstance(each.source, ImageData) else "url"
                    fields.append(ImageField(name, f"{name}.source.{member}"))
    return fields


def chat_messages(body: ConversationFields) -> list[dict[str, Any]]:
    """Converts the system prompt and the messages to messages of a chat request. Raises RequestError.

    Neighbouring messages of the user, or of the assistant, become one message.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _joined(body.system)})
    converted = chain.from_iterable(_converted(each, f"messages[{i}]") for i, each in enumerate(body.messages))
    messages += join_neighbours(converted, {"user": "\n", "assistant": ""})
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "'messages' ends with a message of the assistant, which this server cannot continue. End with a message "
            "of the user.",
            param="messages",
            code="invalid_value",
        )
    return messages


def _converted(message: InputMessage, where: str) -> Iterator[dict[str, Any]]:
    """Converts an input message. Yields a chat message for each tool result. Blocks of other types that follow each
    other become one chat message.
    """
    if message.role == "assistant":
        yield _assistant(message, where)
        return
    blocks: list[TextBlock | ImageBlock] = []
    for i, block in enumerate(message.content):
        if isinstance(block, TextBlock) or (isinstance(block, ImageBlock) and message.role == "user"):
            blocks.append(block)
            continue
        if not isinstance(block, ToolResultBlock) or message.role == "system":
            raise _wrong_block(block.type, f"{where}.content[{i}]", message.role)
        if blocks:
            yield {"role": message.role, "content": _joined(blocks)}
            blocks = []
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
    if blocks or not message.content:
        yield {"role": message.role, "content": _joined(blocks)}


def _assistant(message: InputMessage, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _wrong_block(block.type, f"{where}.content[{i}]", message.role)
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        found["tool_calls"] = calls
        found["content"] = found["content"] or None
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    return found


def _joined(blocks: Iterable[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """Returns blocks as the content of a chat's message. Neighbouring texts become lines of one text."""
    parts = (text_part(block.text) if isinstance(block, TextBlock) else _image(block.source) for block in blocks)
    return joined(parts, "\n")


def _image(source: ImageData | ImageAddress) -> dict[str, Any]:
    if isinstance(source, ImageAddress):
        return image_part(source.url)
    return image_part(f"data:{source.media_type};base64,{source.data}")


def _wrong_block(kind: str, param: str, role: str) -> RequestError:
    return RequestError(
        f"'{param}' has the type {short(kind)}, which a message of role '{role}' cannot have.",
        param=param,
        code="invalid_value",
    )


def _choice_fields(body: ConversationFields) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if (choice.name is None) == (choice.type == "tool"):
        problem = "is required for" if choice.name is None else "is only allowed for"
        raise RequestError(
            f"'tool_choice.name' {problem} the type 'tool'; the type is '{choice.type}'.",
            param="tool_choice.name",
            code="invalid_value",
        )
    fields: dict[str, Any] = {"auto": {"tool_choice": "auto"}, "none": {"tool_choice": "none"}}.get(choice.type, {})
    if choice.type == "any":
        fields = {"tool_choice": "required"}
    elif choice.type == "tool":
        fields = {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _thinking_fields(body: ConversationFields, known_variables: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of the chat request that control the reasoning."""
    thinking, values = body.thinking, dict(body.chat_template_kwargs or {})
    fields: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
    if thinking is not None:
        _check_budget(body)
        if thinking.type == "enabled":
            fields["thinking_token_budget"] = thinking.budget_tokens
        is_on = thinking.type != "disabled"
        switches = {name: is_on for name in _SWITCHES if name in known_variables}
        values = switches | values
    return fields | ({"chat_template_kwargs": values} if values else {})


def _check_budget(body: ConversationFields) -> None:
    thinking = body.thinking
    assert thinking is not None
    budget = thinking.budget_tokens
    if (budget is None) == (thinking.type == "enabled"):
        problem = "is required for" if budget is None else "is only allowed for"
        raise RequestError(
            f"'thinking.budget_tokens' {problem} the type 'enabled'; the type is '{thinking.type}'.",
            param="thinking.budget_tokens",
            code="invalid_value",
        )
    if budget is not None and isinstance(body, MessagesRequest) and budget >= body.max_tokens:
        raise RequestError(
            f"'thinking.budget_tokens' is {budget}; it must be less than 'max_tokens', which is {body.max_tokens}.",
            param="thinking.budget_tokens",
            code="invalid_value",
        )
