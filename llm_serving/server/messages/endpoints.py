"""The endpoints ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from llm_serving.errors import RequestError
from llm_serving.server.fields.images import named_images
from llm_serving.server.generation.scheduling import tenant_of
from llm_serving.server.generation.sequences import count_items
from llm_serving.server.generation.work import off_loop
from llm_serving.server.http.body import ModelT, json_response, read_request, whole_response
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.http.sse import EventStream
from llm_serving.server.limits import INLINE_MESSAGES
from llm_serving.server.messages.answer import MessageStream, message_of
from llm_serving.server.messages.conversion import chat_request, image_fields, named_back, num_entries, without_tags
from llm_serving.server.messages.fields import ConversationFields, CountRequest, MessagesRequest
from llm_serving.server.models.lookup import served
from llm_serving.server.openai.chat import ChatRequest, chat_prompt, start_chat
from llm_serving.server.state import AnyResponse, Endpoint, ServerState


async def _create_message(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``POST /v1/messages``: answers a conversation, streamed or not."""
    state.check_queue(tenant_of(request))
    body = await _read(MessagesRequest, state, request)
    state = await served(state, request, body.model, body)
    chat = await _chat(state, body)
    try:
        generation, plan = await start_chat(state, request, chat, "messages", "msg")
    except RequestError as error:
        raise await _named(error, body, chat) from None
    if body.stream:
        return EventStream(generation, MessageStream(generation, plan, body.max_tokens))
    [answer] = await run_while_connected(state.active, request.receive, generation.answers())
    more = {"receipt": generation.receipt()} if generation.return_receipt else {}
    make = partial(message_of, generation, plan, answer, body.max_tokens, more)
    return await whole_response(generation.request_id, count_items([answer]), make)


async def _count_tokens(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``POST /v1/messages/count_tokens``: the number of tokens of a prompt."""
    body = await _read(CountRequest, state, request)
    state = await served(state, request, body.model, body)
    chat = await _chat(state, body)
    try:
        prompt = await chat_prompt(state, chat)
    except RequestError as error:
        raise await _named(error, body, chat) from None
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _chat(state: ServerState, body: ConversationFields) -> ChatRequest:
    """Converts a request to a chat request. If its messages and blocks are many, another thread converts them."""
    convert = partial(chat_request, body, state.output_format.effort_variables)
    return await off_loop(num_entries(body), convert, INLINE_MESSAGES)


async def _named(error: RequestError, body: ConversationFields, chat: ChatRequest) -> RequestError:
    """Returns the error of the converted chat with the field names of the client's request.

    If the messages and blocks are many, another thread finds the names.
    """

    def named() -> RequestError:
        return named_back(named_images(error, chat.messages, image_fields(body)))

    return await off_loop(num_entries(body), named, INLINE_MESSAGES)


async def _read(model: type[ModelT], state: ServerState, request: Request) -> ModelT:
    try:
        return await read_request(model, request, state.settings.max_body_bytes)
    except RequestError as error:
        raise without_tags(error) from None


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/messages", _create_message, "Anthropic: answer a conversation.", MessagesRequest,
        '{"max_tokens": 64, "messages": [{"role": "user", "content": "Hello!"}]}', queued=True,
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", _count_tokens, "Anthropic: the number of tokens of a conversation.",
        CountRequest, '{"messages": [{"role": "user", "content": "Hello!"}]}',
    ),
)  # fmt: skip
