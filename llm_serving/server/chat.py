"""The published dialect ``/chat`` and ``/stream_chat_post``."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.request import RequestOutput
from llm_serving.server.body import read_json_object
from llm_serving.server.choices import Choice, make_choices
from llm_serving.server.errors import ErrorReply
from llm_serving.server.generate import dialect_error
from llm_serving.server.generation import Generation
from llm_serving.server.lifecycle import run_while_connected
from llm_serving.server.logits import step_logits
from llm_serving.server.prompts import chat_prompt
from llm_serving.server.protocol_dialects import ChatDialectRequest, GenerationSettings
from llm_serving.server.responses import json_response
from llm_serving.server.sampling import dialect_sampling, output_room
from llm_serving.server.sse import EventStream
from llm_serving.server.state import ServerState
from llm_serving.server.validation import parse

__all__ = ["chat", "stream_chat"]


async def chat(state: ServerState, request: Request) -> Response | EventStream:
    """Answers ``query``."""
    return await _chat(state, request, stream=False)


async def stream_chat(state: ServerState, request: Request) -> Response | EventStream:
    """Answers ``query`` piece by piece."""
    return await _chat(state, request, stream=True)


async def _chat(state: ServerState, request: Request, *, stream: bool) -> Response | EventStream:
    state.require_room()
    body = parse(ChatDialectRequest, await read_json_object(request, state.settings.max_body_bytes))
    settings = body.gen_kwargs or GenerationSettings()
    stream = stream or bool(body.stream)
    generation = Generation(state, request, "chat", "chat", body, stream=stream)
    messages: list[dict[str, object]] = [{"role": turn.role, "content": turn.content} for turn in body.history]
    messages.append({"role": body.role, "content": body.query})
    prompt = await chat_prompt(state, messages, settings.prefix_text or "")
    limit, name = _smaller_limit(settings)
    room = output_room(len(prompt.token_ids), limit, state.settings, name)
    generation.choices = make_choices(
        generation.request_id, [prompt], [(dialect_sampling(settings), room)], 1, settings.seed
    )
    state.require_ready()
    request_id = generation.request_id if body.request_id is None else body.request_id
    if stream:
        return EventStream(generation, ChatEvents(generation, settings, request_id))
    return await _answer(state, request, generation, settings, request_id)


async def _answer(
    state: ServerState, request: Request, generation: Generation, settings: GenerationSettings, request_id: str
) -> Response:
    work = generation.answers(keep_logits=bool(settings.return_logits))
    [answer] = await run_while_connected(state.active, request.receive, work)
    result: dict[str, Any] = {
        "request_id": request_id,
        "response": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": _usage(generation, len(answer.token_ids)),
    }
    if generation.return_receipt:
        result["receipt"] = generation.receipt()
    if settings.return_logits:
        result["logits"] = step_logits(answer.logits)
    return json_response(result, generation.request_id)


def _usage(generation: Generation, num_output_tokens: int) -> dict[str, int]:
    num_prompt_tokens = generation.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def _smaller_limit(settings: GenerationSettings) -> tuple[int | None, str]:
    """Both limits count new tokens; the smaller one wins."""
    limits = [
        (limit, name)
        for limit, name in (
            (settings.max_new_tokens, "gen_kwargs.max_new_tokens"),
            (settings.max_length, "gen_kwargs.max_length"),
        )
        if limit is not None
    ]
    return min(limits) if limits else (None, "gen_kwargs.max_new_tokens")


class ChatEvents:
    """``delta`` is the new text; the last event has the whole ``response``, the reason and the counts."""

    def __init__(self, generation: Generation, settings: GenerationSettings, request_id: str) -> None:
        self._generation = generation
        self._return_logits = bool(settings.return_logits)
        self._request_id = request_id
        self._texts: list[str] = []
        self._num_tokens = 0

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        """One event."""
        self._texts.append(piece.text)
        self._num_tokens += len(piece.token_ids)
        event: dict[str, Any] = {"request_id": self._request_id, "delta": piece.text, "finish_reason": None}
        if self._return_logits:
            event["logits"] = step_logits(piece.logits)
        if piece.finish_reason is not None:
            event["finish_reason"] = piece.finish_reason.value
            event["response"] = "".join(self._texts)
            event["usage"] = _usage(self._generation, self._num_tokens)
            if self._generation.return_receipt:
                event["receipt"] = self._generation.receipt()
        elif not piece.text and not self._return_logits:
            return b""
        return b"data: " + orjson.dumps(event) + b"\n\n"

    def last(self) -> bytes:
        """The last event has said it all."""
        return b""

    def error(self, reply: ErrorReply) -> bytes:
        """After the stream has begun."""
        return dialect_error(reply)
