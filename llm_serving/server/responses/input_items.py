"""The input items of a stored response, as ``GET /v1/responses/{response_id}/input_items`` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_serving.server.responses.fields import (
    CallItem,
    ImagePart,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
    TextPart,
)
from llm_serving.server.responses.store import StoredItem

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def input_items(body: ResponsesRequest, response_id: str, earlier: Sequence[StoredItem]) -> list[StoredItem]:
    """Returns the items of the conversation before the answer, oldest first. Gives an id to each item of ``body``.

    ``earlier`` are the items of the stored conversation that ``body`` continues, including its answers.
    """
    items, name = list(earlier), response_id.rpartition("-")[2]
    for number, item in enumerate(body.input):
        item_id = f"{_PREFIXES[item.type]}_{name}_in{number}"
        items.append(StoredItem.of({"id": item_id, "type": item.type, "status": "completed", **_members(item)}))
    return items


def answer_items(output: Sequence[dict[str, Any]]) -> list[StoredItem]:
    """Returns the output items of a response as items for later requests, without their log-probabilities."""
    return [StoredItem.of(_without_logprobs(item)) for item in output]


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def _members(item: MessageItem | CallItem | ResultItem | ReasoningItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        is_answer = item.role == "assistant"
        return {"role": item.role, "content": [_part(part, is_answer=is_answer) for part in item.content]}
    if isinstance(item, CallItem):
        return {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if isinstance(item, ReasoningItem):
        return {"summary": [], "content": [part.model_dump() for part in item.content or ()]}
    output: str | list[dict[str, Any]] = [_part(part) for part in item.output]
    if len(item.output) == 1 and isinstance(item.output[0], TextPart):
        output = item.output[0].text
    return {"call_id": item.call_id, "output": output}


def _part(part: Part, *, is_answer: bool = False) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto"}
    if is_answer:
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.text}
