"""Every endpoint: its path, its handler, what it takes and an example. The router and the docs are made from this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llm_serving.server import admin, chat, generate, models, openai_chat, openai_completions, pages, receipts
from llm_serving.server.protocol_dialects import ChatDialectRequest, GenerateRequest
from llm_serving.server.protocol_openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from llm_serving.server.state import ServerState
from llm_serving.server.validation import RequestModel

__all__ = ["ENDPOINTS", "AnyResponse", "Endpoint", "Handler"]


class AnyResponse(Protocol):
    """A Starlette response, or a stream."""

    status_code: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


Handler = Callable[[ServerState, Request], Awaitable[AnyResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. ``example`` is the JSON body of the example, without the braces' line breaks."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[RequestModel] | None = None
    example: str | None = None
    in_docs: bool = True


_COMPLETION = '{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}'
_CHAT = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'
_GENERATE = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32, "do_sample": false}}'
_DIALECT = '{"request_id": "1", "query": "Hello!", "role": "user", "history": [], "gen_kwargs": {"max_new_tokens": 64}}'

ENDPOINTS = (
    Endpoint("GET", "/v1/models", models.list_models, "The served model, as OpenAI lists it."),
    Endpoint("GET", "/v1/models/{name:path}", models.get_model, "The served model by its name."),
    Endpoint(
        "POST", "/v1/completions", openai_completions.create_completion,
        "OpenAI: continue prompts.", CompletionRequest, _COMPLETION,
    ),
    Endpoint(
        "POST", "/v1/chat/completions", openai_chat.create_chat_completion,
        "OpenAI: answer a conversation.", ChatRequest, _CHAT,
    ),
    Endpoint(
        "POST", "/models/{name}/generate", generate.generate,
        "Continue a prompt.", GenerateRequest, _GENERATE,
    ),
    Endpoint(
        "POST", "/models/{name}/generate_stream", generate.generate_stream,
        "Continue a prompt, token by token.", GenerateRequest, _GENERATE,
    ),
    Endpoint("POST", "/generate", generate.generate, "Continue a prompt.", GenerateRequest, _GENERATE),
    Endpoint(
        "POST", "/generate_stream", generate.generate_stream,
        "Continue a prompt, token by token.", GenerateRequest, _GENERATE,
    ),
    Endpoint("POST", "/chat", chat.chat, "Answer a question in a conversation.", ChatDialectRequest, _DIALECT),
    Endpoint(
        "POST", "/stream_chat_post", chat.stream_chat,
        "Answer a question in a conversation, piece by piece.", ChatDialectRequest, _DIALECT,
    ),
    Endpoint(
        "POST", "/tokenize", admin.tokenize,
        "The tokens of a text or a conversation.", TokenizeRequest, '{"prompt": "Once upon a time"}',
    ),
    Endpoint(
        "POST", "/detokenize", admin.detokenize, "The text of tokens.", DetokenizeRequest, '{"tokens": [1, 300, 301]}'
    ),
    Endpoint(
        "GET", "/requests/{request_id}", receipts.get_request,
        "Why a request was slow: its receipt, while it is served and for a while after.",
    ),
    Endpoint("GET", "/health/live", admin.health_live, "200 while the process answers."),
    Endpoint("GET", "/health/ready", admin.health_ready, "200 while requests are served, 503 otherwise."),
    Endpoint("GET", "/metrics", admin.metrics, "Metrics for Prometheus."),
    Endpoint("GET", "/server_info", admin.server_info, "The model, the limits, and how the engine is doing."),
    Endpoint("GET", "/openapi.json", pages.openapi, "This API as an OpenAPI document."),
    Endpoint("GET", "/docs", pages.docs, "This API for people.", in_docs=False),
    Endpoint("GET", "/", pages.chat_page, "The chat page.", in_docs=False),
)  # fmt: skip
