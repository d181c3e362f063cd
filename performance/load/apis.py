"""The streaming APIs that the load test can call: their requests, and the events of their responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from performance.load.workload import LoadRequest
from performance.program import UsageError


class Generation(msgspec.Struct, frozen=True):
    """Options of text generation that are the same for every request of a run."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = False
    return_token_ids: bool = False


class Piece(msgspec.Struct, frozen=True):
    """The parsed content of one server-sent event.

    ``has_output`` is True if the event has text or tokens, or ends the output.
    """

    has_output: bool = False
    token_ids: int = 0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    request_id: str | None = None
    error: str | None = None
    text: str = ""


class Api(ABC):
    """One kind of streaming API: the path and the body of its requests, and the events of its responses."""

    @abstractmethod
    def path(self, generation: Generation) -> str:
        """Returns the URL path of the endpoint."""

    @abstractmethod
    def body(self, request: LoadRequest, generation: Generation, request_id: str, seed: int) -> dict[str, Any]:
        """Returns the JSON body of a request. ``seed`` is used only if sampling is random."""

    @abstractmethod
    def read(self, payload: bytes) -> Piece:
        """Parses the data of one event. Raises ``msgspec.DecodeError`` if it is not an event of this API."""

    def check(self, requests: Sequence[LoadRequest]) -> None:
        """Raises ``UsageError`` if the API cannot express one of ``requests``."""
        if any(request.text is None for request in requests):
            raise UsageError("this --api takes only text prompts: no token ids, no chat messages")


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class OpenAIChunk(msgspec.Struct):
    id: str | None = None
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class OpenAIApi(Api):
    """Base of the OpenAI APIs for completions and chat completions. Only the prompt differs between the two."""

    _decoder = msgspec.json.Decoder(OpenAIChunk)

    def _body(self, request: LoadRequest, generation: Generation, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": generation.model,
            "max_tokens": request.max_tokens,
            "temperature": generation.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if generation.temperature > 0:
            body["seed"] = seed
        if generation.ignore_eos:
            body["ignore_eos"] = True
        if generation.return_token_ids:
            body["return_token_ids"] = True
        return body

    def read(self, payload: bytes) -> Piece:
        chunk = self._decoder.decode(payload)
        if chunk.error is not None:
            return Piece(error=error_text(chunk.error))
        choice = chunk.choices[0] if chunk.choices else None
        usage = chunk.usage
        return Piece(
            has_output=choice is not None and _has_output(choice),
            token_ids=len(choice.token_ids) if choice and choice.token_ids else 0,
            finish_reason=choice.finish_reason if choice else None,
            prompt_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
            request_id=chunk.id,
            text=_text(choice) if choice else "",
        )


class CompletionsApi(OpenAIApi):
    def path(self, generation: Generation) -> str:
        return "/v1/completions"

    def body(self, request: LoadRequest, generation: Generation, request_id: str, seed: int) -> dict[str, Any]:
        prompt = request.text if request.text is not None else request.token_ids
        return {"prompt": prompt, **self._body(request, generation, seed)}

    def check(self, requests: Sequence[LoadRequest]) -> None:
        if any(request.messages is not None for request in requests):
            raise UsageError("--api openai takes prompts, but the data set has chat messages: use --api openai-chat")


class ChatCompletionsApi(OpenAIApi):
    def path(self, generation: Generation) -> str:
        return "/v1/chat/completions"

    def body(self, request: LoadRequest, generation: Generation, request_id: str, seed: int) -> dict[str, Any]:
        messages = request.messages or ({"role": "user", "content": request.text},)
        return {"messages": messages, **self._body(request, generation, seed)}

    def check(self, requests: Sequence[LoadRequest]) -> None:
        if any(request.token_ids is not None for request in requests):
            raise UsageError("--api openai-chat takes text and no token ids: use --api openai")


class Token(msgspec.Struct):
    text: str | None = None


class GenerateChunk(msgspec.Struct):
    token: Token | None = None
    finish_reason: str | None = None
    generated_tokens: int | None = None
    error: Any = None


class GenerateApi(Api):
    """The API ``/models/{name}/generate_stream``. The last event of a stream has the number of output tokens."""

    _decoder = msgspec.json.Decoder(GenerateChunk)

    def path(self, generation: Generation) -> str:
        return f"/models/{quote(generation.model, safe='')}/generate_stream"

    def body(self, request: LoadRequest, generation: Generation, request_id: str, seed: int) -> dict[str, Any]:
        parameters = {"max_new_tokens": request.max_tokens, **_dialect_sampling(generation, seed)}
        return {"inputs": request.text, "parameters": parameters}

    def read(self, payload: bytes) -> Piece:
        chunk = self._decoder.decode(payload)
        if chunk.error is not None:
            return Piece(error=error_text(chunk.error))
        return Piece(
            has_output=bool((chunk.token and chunk.token.text) or chunk.finish_reason),
            finish_reason=chunk.finish_reason,
            output_tokens=chunk.generated_tokens,
            text=(chunk.token.text if chunk.token else None) or "",
        )


class ChatChunk(msgspec.Struct):
    delta: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    request_id: str | None = None
    error: Any = None


class ChatApi(Api):
    """The API ``/stream_chat_post``. The load test sends one query and no history of earlier messages."""

    _decoder = msgspec.json.Decoder(ChatChunk)

    def path(self, generation: Generation) -> str:
        return "/stream_chat_post"

    def body(self, request: LoadRequest, generation: Generation, request_id: str, seed: int) -> dict[str, Any]:
        settings = {"max_new_tokens": request.max_tokens, **_dialect_sampling(generation, seed)}
        return {
            "request_id": request_id,
            "query": request.text,
            "role": "user",
            "history": [],
            "gen_kwargs": settings,
        }

    def read(self, payload: bytes) -> Piece:
        chunk = self._decoder.decode(payload)
        if chunk.error is not None:
            return Piece(error=error_text(chunk.error))
        usage = chunk.usage
        return Piece(
            has_output=bool(chunk.delta or chunk.finish_reason),
            finish_reason=chunk.finish_reason,
            prompt_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
            request_id=chunk.request_id,
            text=chunk.delta or "",
        )


APIS: dict[str, Api] = {
    "openai": CompletionsApi(),
    "openai-chat": ChatCompletionsApi(),
    "generate": GenerateApi(),
    "chat": ChatApi(),
}
OPENAI_APIS = ("openai", "openai-chat")
"""The APIs that support ``ignore_eos`` and ``return_token_ids``."""


def _dialect_sampling(generation: Generation, seed: int) -> dict[str, Any]:
    if generation.temperature > 0:
        return {"do_sample": True, "temperature": generation.temperature, "seed": seed}
    return {"do_sample": False}


def error_text(error: Any) -> str:
    """Returns the message of an API's error object, or the whole object as text."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return str(error)


def _text(choice: Choice) -> str:
    return choice.text or (choice.delta.content if choice.delta else None) or ""


def _has_output(choice: Choice) -> bool:
    if choice.text or choice.token_ids or choice.finish_reason:
        return True
    return choice.delta is not None and bool(choice.delta.content or choice.delta.reasoning_content)
