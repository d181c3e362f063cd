"""Converts a request of ``/v1/responses`` to a chat request. In errors of the chat request, restores the field names.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from pydantic import ValidationError

from llm_serving.errors import RequestError
from llm_serving.server.fields.images import ImageField, as_parts, image_part, joined, text_part
from llm_serving.server.fields.neighbours import join_neighbours
from llm_serving.server.fields.renamed import renamed
from llm_serving.server.fields.shared import is_image
from llm_serving.server.fields.validation import request_error
from llm_serving.server.generation.scheduling import SchedulingFields
from llm_serving.server.generation.work import call_entries
from llm_serving.server.openai.chat import ChatRequest
from llm_serving.server.responses.fields import (
    LOGPROBS,
    CallItem,
    ImagePart,
    MessageItem,
    NamedFunction,
    Part,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
    TextPart,
)

_FIELDS = (
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"max_tokens", "max_output_tokens"),
    (r"messages", "input"),
)
"""Renames fields of the chat request to fields of ``/v1/responses``, for errors.

Each pair has a pattern for a field of the chat request, and the name of the field from which it was made.
"""


_ITEM = r"input\[(\d+)\]\.(?:message|function_call_output|function_call|reasoning)"
_PART = r"\.(content|output)\[(\d+)\]\.(?:input_text|output_text|input_image)"
_TAGS = (
    (rf"{_ITEM}{_PART}\b", r"input[\1].\2[\3]"),
    (rf"{_ITEM}\b", r"input[\1]"),
    (r"tool_choice\.(?:literal|NamedFunction).*", "tool_choice"),
)
"""Converts the locations that pydantic reports to locations in the request.

If a field may have several types, pydantic adds the name of the type to the location. Each pair has a pattern for
pydantic's location, and its replacement without the type.
"""


def without_tags(error: RequestError) -> RequestError:
    """Returns ``error`` with the location of the field in the client's request.

    pydantic adds the names of types to the location of a field. This function removes them.
    """
    return renamed(error, _TAGS)


def named_back(error: RequestError) -> RequestError:
    """Returns an error of the converted chat request, with the names of the fields in ``/v1/responses``."""
    return renamed(error, _FIELDS)


def image_fields(body: ResponsesRequest, earlier: Sequence[dict[str, Any]]) -> list[ImageField]:
    """Returns the field names of each image in ``earlier`` and ``body``, in the order of the images in the chat.

    ``earlier`` are the stored messages of the conversation.
    """
    stored = "previous_response_id"
    parts = chain.from_iterable(as_parts(message["content"] or "") for message in earlier)
    fields = [ImageField(stored, stored) for part in parts if is_image(part)]
    for i, item in enumerate(body.input):
        member, content = ("output", item.output) if isinstance(item, ResultItem) else ("content", ())
        content = item.content if isinstance(item, MessageItem) else content
        for j, part in enumerate(content):
            if isinstance(part, ImagePart):
                fields.append(ImageField(f"input[{i}].{member}[{j}]", f"input[{i}].{member}[{j}].image_url"))
    return fields


_SEPARATORS = {"assistant": ""}
"""Maps a role to the text between the contents of neighbouring messages that become one message.

An answer consists of several items (text, reasoning and calls), which become one message of the assistant. Messages of
other roles are not joined.
"""


def num_entries(body: ResponsesRequest, earlier: Sequence[dict[str, Any]]) -> int:
    """Returns the cost of converting a conversation: about the number of its messages, items and parts.

    ``earlier`` are the stored messages of the conversation, and ``body`` has its new items. A tool call with long
    arguments counts as several items.
    """
    calls = chain.from_iterable(message.get("tool_calls", ()) for message in earlier)
    total = len(earlier) + sum(call_entries(len(call["function"]["arguments"])) for call in calls)
    for item in body.input:
        if isinstance(item, ResultItem):
            total += 1 + len(item.output)
        elif isinstance(item, CallItem):
            total += call_entries(len(item.arguments))
        else:
            total += 1 + len(item.content or ())
    return total


def conversation(body: ResponsesRequest, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the conversation as chat messages, without the instructions. ``earlier`` are its stored messages.

    Raises RequestError for an image in a message of the assistant.
    """
    messages = list(earlier)
    for i, item in enumerate(body.input):
        if isinstance(item, MessageItem):
            if item.role == "assistant":
                _check_text(item.content, f"input[{i}].content")
            messages.append({"role": item.role, "content": _joined(item.content)})
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif isinstance(item, ReasoningItem):
            thoughts = "".join(part.text for part in item.content or ())
            if thoughts:
                messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        else:
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
    return join_neighbours(messages, _SEPARATORS)


def chat_request(body: ResponsesRequest, messages: Sequence[dict[str, Any]]) -> ChatRequest:
    """Converts ``body`` to a chat request for these messages, with the same meaning. Raises RequestError."""
    chat: dict[str, Any] = {name: getattr(body, name) for name in SchedulingFields.model_fields}
    names = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "chat_template_kwargs")
    chat |= {name: getattr(body, name) for name in names}
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    chat |= {"messages": [*system, *messages], "max_tokens": body.max_output_tokens}
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    if body.top_logprobs and not body.wants_logprobs:
        raise RequestError(
            f"'top_logprobs' is only allowed when 'include' has '{LOGPROBS}'.",
            param="top_logprobs",
            code="invalid_value",
        )
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    choice = body.tool_choice
    chat["tool_choice"] = (
        {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
    )
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        form = body.text.format
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            chat["response_format"]["json_schema"] = {"name": form.name, "schema": form.json_schema}
    try:
        return ChatRequest.model_validate({name: value for name, value in chat.items() if value is not None})
    except ValidationError as error:
        raise named_back(request_error(error)) from None


def answer_message(output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the items of a response's output as a message of the assistant."""
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for item in output:
        if item["type"] == "message":
            messages.append({"role": "assistant", "content": "".join(part["text"] for part in item["content"])})
        elif item["type"] == "reasoning":
            thoughts = "".join(part["text"] for part in item["content"])
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    [message] = join_neighbours(messages, _SEPARATORS)
    return message


def _joined(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    chat = (
        text_part(part.text) if isinstance(part, TextPart) else image_part(part.image_url, part.detail)
        for part in parts
    )
    return joined(chat, "")


def _check_text(parts: Sequence[Part], param: str) -> None:
    for i, part in enumerate(parts):
        if isinstance(part, ImagePart):
            raise RequestError(
                f"'{param}[{i}]' is an image in a message of the assistant, which has only text.",
                param=f"{param}[{i}]",
                code="invalid_value",
            )
