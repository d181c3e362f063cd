"""The endpoints ``POST /v1/responses``, and those of a stored response: get, list its input items, delete."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import RequestError
from llm_serving.server.fields.images import named_images
from llm_serving.server.fields.validation import clip, short
from llm_serving.server.generation.scheduling import tenant_of
from llm_serving.server.generation.sequences import count_items
from llm_serving.server.generation.work import off_loop
from llm_serving.server.http.body import json_response, read_request, whole_response
from llm_serving.server.http.json_pieces import PiecesResponse
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.http.list_pages import in_order, page_of
from llm_serving.server.http.sse import EventStream
from llm_serving.server.limits import INLINE_MESSAGES
from llm_serving.server.models.lookup import served
from llm_serving.server.openai.chat import ChatRequest, start_chat
from llm_serving.server.responses.answer import Responder, ResponseStream
from llm_serving.server.responses.conversion import (
    chat_request,
    conversation,
    image_fields,
    named_back,
    num_entries,
    without_tags,
)
from llm_serving.server.responses.fields import ResponsesRequest
from llm_serving.server.responses.input_items import input_items
from llm_serving.server.responses.store import StoredItem, StoredResponse
from llm_serving.server.state import AnyResponse, Endpoint, ServerState

DEFAULT_ITEMS, MAX_ITEMS = 20, 100
"""Default and maximum number of input items in one page."""


class UnknownResponseError(RequestError):
    """The response is not stored, or it belongs to another tenant."""

    status = 404
    code = "response_not_found"


async def _create_response(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``POST /v1/responses``: answers a conversation, streamed or not, and stores the response."""
    tenant = tenant_of(request)
    state.check_queue(tenant)
    try:
        body = await read_request(ResponsesRequest, request, state.settings.max_body_bytes)
    except RequestError as error:
        raise without_tags(error) from None
    state = await served(state, request, body.model, body)
    earlier: list[dict[str, Any]] = []
    items: list[StoredItem] = []
    if body.previous_response_id is not None:
        found = _stored(state, tenant, body.previous_response_id, "previous_response_id")
        earlier = orjson.loads(found.messages)
        items = [*found.items, *found.answer]
    size = num_entries(body, earlier)
    messages, chat = await off_loop(size, partial(_converted, body, earlier), INLINE_MESSAGES)
    try:
        generation, plan = await start_chat(state, request, chat, "responses", "resp")
    except RequestError as error:
        named = await off_loop(size, partial(_named, error, body, earlier, chat), INLINE_MESSAGES)
        raise named from None
    items = await off_loop(size, partial(input_items, body, generation.request_id, items), INLINE_MESSAGES)
    responder = Responder(generation, plan, body, messages, items, tenant)
    if body.stream:
        return EventStream(generation, ResponseStream(responder))
    work = generation.answers(keep_logits=body.wants_logprobs)
    [answer] = await run_while_connected(state.active, request.receive, work)
    response = await responder.whole(answer)
    responder.keep(response)
    return await whole_response(generation.request_id, count_items([answer]), lambda: response)


def _converted(body: ResponsesRequest, earlier: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], ChatRequest]:
    """Returns the conversation as chat messages, and the chat request. Raises RequestError."""
    messages = conversation(body, earlier)
    return messages, chat_request(body, messages)


def _named(
    error: RequestError, body: ResponsesRequest, earlier: Sequence[dict[str, Any]], chat: ChatRequest
) -> RequestError:
    """Returns the error of the converted chat with the field names of the client's request."""
    return named_back(named_images(error, chat.messages, image_fields(body, earlier)))


async def _get_response(state: ServerState, request: Request) -> AnyResponse:
    found = _stored(state, tenant_of(request), request.path_params["response_id"], "response_id")
    return PiecesResponse(found.body, {})


async def _list_input_items(state: ServerState, request: Request) -> Response:
    found = _stored(state, tenant_of(request), request.path_params["response_id"], "response_id")
    for name in request.query_params:
        if name not in ("after", "limit", "order"):
            raise RequestError(
                f"'{clip(name)}' is not supported here; the parameters are after, limit and order.",
                param=clip(name),
                code="unsupported_parameter",
            )
    items = [{"id": item.id, "json": item.json} for item in in_order(request, list(found.items))]
    page = page_of(request, items, DEFAULT_ITEMS, MAX_ITEMS)
    return json_response(page | {"data": [orjson.Fragment(item["json"]) for item in page["data"]]})


async def _delete_response(state: ServerState, request: Request) -> Response:
    response_id, tenant = request.path_params["response_id"], tenant_of(request)
    _stored(state, tenant, response_id, "response_id")
    state.responses.delete(tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _stored(state: ServerState, tenant: str, response_id: str, param: str) -> StoredResponse:
    """Returns a stored response of the tenant. Raises UnknownResponseError."""
    found = state.responses.get(tenant, response_id)
    if found is None:
        raise UnknownResponseError(
            f"The response {short(response_id)} is not stored for this API key. Only the newest responses are kept, in "
            "memory, until the server stops. Send the whole conversation as 'input'.",
            param=param,
        )
    return found


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/responses", _create_response, "OpenAI: answer an input and store the response.", ResponsesRequest,
        '{"input": "Hello!", "max_output_tokens": 64}', queued=True,
    ),
    Endpoint("GET", "/v1/responses/{response_id}", _get_response, "OpenAI: a stored response."),
    Endpoint(
        "GET", "/v1/responses/{response_id}/input_items", _list_input_items,
        "OpenAI: the conversation before a stored response, newest item first.",
    ),
    Endpoint("DELETE", "/v1/responses/{response_id}", _delete_response, "OpenAI: delete a stored response."),
)  # fmt: skip
