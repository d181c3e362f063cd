"""The endpoint ``POST /v1/chat/completions`` of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import orjson
from pydantic import Field
from starlette.requests import Request

from llm_serving.errors import RequestError
from llm_serving.request import RequestOutput
from llm_serving.server.beams import check_beam_fields, search_answers
from llm_serving.server.body import read_request
from llm_serving.server.generation import Answer, Generation
from llm_serving.server.json_pieces import EncodedList
from llm_serving.server.lifecycle import run_while_connected
from llm_serving.server.limits import MAX_LOGPROBS
from llm_serving.server.logprobs import chat_entries
from llm_serving.server.openai_stream import (
    FINISH,
    OpenAIStream,
    check_stream_options,
    choice_of,
    response_of,
    stop_reason_json,
)
from llm_serving.server.prompts import check_choices, check_prompt, encode_chat, max_output_tokens
from llm_serving.server.protocol import IGNORED, MaxTokens, Messages, SamplingFields, TemplateValues
from llm_serving.server.sampling import Choice, base_sampling, make_choices
from llm_serving.server.scheduling import tenant_of
from llm_serving.server.sse import EventStream
from llm_serving.server.state import AnyResponse, Endpoint, ServerState
from llm_serving.server.structured import compiled_grammar


class ChatRequest(SamplingFields):
    """Request body of ``/v1/chat/completions``: a conversation that the assistant continues."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "logit_bias": (None, {}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None, "none"),
        "verbosity": (None,),
        "web_search_options": (None,),
        "moderation": (None,),
    }
    ignored = IGNORED | {"parallel_tool_calls"}

    messages: Messages
    max_tokens: MaxTokens = Field(
        default=None, description="Maximum number of tokens to generate (default: the rest of the context)."
    )
    max_completion_tokens: MaxTokens = Field(default=None, description="The newer name of `max_tokens`.")
    logprobs: bool | None = Field(default=None, description="Return log-probabilities.")
    chat_template_kwargs: TemplateValues = Field(default_factory=dict)
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Number of best tokens with log-probabilities, for each token."
    )


async def create_chat_completion(state: ServerState, request: Request) -> AnyResponse:
    """Handle ``POST /v1/chat/completions``: answer a conversation ``n`` times, streamed or not."""
    state.check_queue(tenant_of(request))
    body = await read_request(ChatRequest, request, state.settings.max_body_bytes)
    state.check_model(body.model)
    _check(body)
    generation = Generation(state, request, "chat.completions", "chatcmpl", body, stream=bool(body.stream))
    generation.choices = await _choices(state, body, generation.request_id)
    state.check_ready()
    if body.stream:
        return EventStream(generation, ChatStream(generation, body))
    if body.use_beam_search:
        has_limit = body.max_tokens is not None or body.max_completion_tokens is not None
        work = search_answers(generation, body, None, has_limit=has_limit)
    else:
        work = generation.answers(keep_logits=bool(body.logprobs))
    answers = await run_while_connected(state.active, request.receive, work)
    return await response_of(generation, "chat.completion", answers, partial(_choice, generation, body))


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/chat/completions", create_chat_completion, "OpenAI: answer a conversation.", ChatRequest,
        '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}',
    ),
)  # fmt: skip


def _check(body: ChatRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs", code="invalid_value"
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            f"'max_tokens' is {body.max_tokens} and 'max_completion_tokens' is {body.max_completion_tokens}; give one.",
            param="max_tokens",
            code="invalid_value",
        )
    check_stream_options(body)
    check_beam_fields(body)


async def _choices(state: ServerState, body: ChatRequest, request_id: str) -> list[Choice]:
    n = body.n or 1
    check_choices(1, n)
    messages = [message.for_template() for message in body.messages]
    prompt = await encode_chat(state, messages, template_values=body.chat_template_kwargs)
    ids = prompt.token_ids
    check_prompt(len(ids), state.settings, "messages")
    newer = body.max_completion_tokens is not None
    wanted = body.max_completion_tokens if newer else body.max_tokens
    name = "max_completion_tokens" if newer else "max_tokens"
    max_tokens = max_output_tokens(len(ids), wanted, state.settings, name)
    params = replace(
        base_sampling(body, state.settings.sampling_defaults),
        logprobs=bool(body.logprobs),
        top_logits=body.top_logprobs or 0,
    )
    grammar = await compiled_grammar(state, body, ignore_eos=params.ignore_eos, beams=bool(body.use_beam_search))
    return make_choices(state.settings, request_id, [prompt], [(params, max_tokens)], n, body.seed, grammar)


def _choice(generation: Generation, body: ChatRequest, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if body.logprobs:
        entries = chat_entries(generation.state.engine.tokenizer, answer.logits, body.top_logprobs or 0)
        logprobs = {"content": EncodedList(entries), "refusal": None}
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    return choice_of(body, answer, {"message": message}, logprobs)


class ChatStream(OpenAIStream):
    """Formats the chunks of a streamed chat: first the role, then pieces of text, then the finish reason."""

    object = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatRequest) -> None:
        super().__init__(generation, body)
        self._logprobs = body.top_logprobs or 0 if body.logprobs else None

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        events = []
        if self.count(choice, piece):
            events.append(self.event(choice.index, _ROLE, self.token_ids(choice, (), first=True)))
        logprobs = b"null"
        if self._logprobs is not None and piece.logits:
            entries = list(chat_entries(self.tokenizer, piece.logits, self._logprobs))
            logprobs = orjson.dumps({"content": entries, "refusal": None})
        if piece.text or logprobs != b"null" or (piece.token_ids and self.wants_token_ids):
            ids = self.token_ids(choice, piece.token_ids, first=False)
            text = orjson.dumps(piece.text)
            events.append(
                self.event(
                    choice.index,
                    b',"delta":{"content":',
                    text,
                    b'},"logprobs":',
                    logprobs,
                    b',"finish_reason":null',
                    ids,
                )
            )
        if piece.finish_reason is not None:
            reason, stop_reason = FINISH[piece.finish_reason], stop_reason_json(piece)
            fields = (b',"delta":{},"logprobs":null,"finish_reason":', reason, stop_reason)
            events.append(self.event(choice.index, *fields))
        return b"".join(events)


_ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
