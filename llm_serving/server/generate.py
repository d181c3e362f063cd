"""The published dialect ``/models/{name}/generate`` and ``/models/{name}/generate_stream``, also without the model.

A stream is one event a token, ``data:{"token": {...}, "generated_text": null, ...}``; the last one has the whole
``generated_text``. A token's ``text`` is what became certain with it, so the texts join to ``generated_text``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.request import RequestOutput, TokenLogits
from llm_serving.server.body import read_json_object
from llm_serving.server.choices import Answer, Choice, make_choices
from llm_serving.server.errors import ErrorReply
from llm_serving.server.generation import Generation
from llm_serving.server.lifecycle import run_while_connected
from llm_serving.server.logits import step_logits
from llm_serving.server.models import check_model
from llm_serving.server.openai_logprobs import LOWEST, token_string
from llm_serving.server.prompts import resolve_prompts
from llm_serving.server.protocol_dialects import GenerateParameters, GenerateRequest
from llm_serving.server.responses import json_response
from llm_serving.server.sampling import dialect_sampling, output_room
from llm_serving.server.sse import EventStream
from llm_serving.server.state import ServerState
from llm_serving.server.validation import parse

__all__ = ["dialect_error", "generate", "generate_stream"]

DEFAULT_MAX_NEW_TOKENS = 300


async def generate(state: ServerState, request: Request) -> Response | EventStream:
    """Continues ``inputs``."""
    return await _generate(state, request, stream=False)


async def generate_stream(state: ServerState, request: Request) -> Response | EventStream:
    """Continues ``inputs``, token by token."""
    return await _generate(state, request, stream=True)


async def _generate(state: ServerState, request: Request, *, stream: bool) -> Response | EventStream:
    check_model(state, request.path_params.get("name"))
    state.require_room()
    body = parse(GenerateRequest, await read_json_object(request, state.settings.max_body_bytes))
    parameters = body.parameters or GenerateParameters()
    stream = stream or bool(body.stream)
    generation = Generation(state, request, "generate", "gen", body, stream=stream)
    [prompt] = await resolve_prompts(state, [body.inputs], "inputs")
    name = "parameters.max_new_tokens"
    room = output_room(len(prompt.token_ids), parameters.max_new_tokens, state.settings, name)
    if parameters.max_new_tokens is None:
        room = min(room, DEFAULT_MAX_NEW_TOKENS)
    keep = bool(parameters.details or parameters.return_logits)
    sampling = dialect_sampling(parameters, parameters.top_n_tokens or 0, logprobs=stream or keep)
    generation.choices = make_choices(generation.request_id, [prompt], [(sampling, room)], 1, parameters.seed)
    state.require_ready()
    if stream:
        return EventStream(generation, GenerateEvents(generation, parameters, body.inputs))
    [answer] = await run_while_connected(state.active, request.receive, generation.answers(keep_logits=keep))
    text = body.inputs + answer.text if parameters.return_full_text else answer.text
    result = {"generated_text": text, **_summary(generation, parameters, answer)}
    if parameters.return_logits:
        result["logits"] = step_logits(answer.logits)
    return json_response(result, generation.request_id)


def _summary(generation: Generation, parameters: GenerateParameters, answer: Answer) -> dict[str, Any]:
    """What goes with the finished text."""
    summary: dict[str, Any] = {
        "finish_reason": answer.finish_reason,
        "generated_tokens": len(answer.token_ids),
        "seed": answer.choice.sampling.seed,
        "details": None,
    }
    if generation.return_receipt:
        summary["receipt"] = generation.receipt()
    if parameters.details:
        summary["details"] = {
            "finish_reason": answer.finish_reason,
            "generated_tokens": len(answer.token_ids),
            "seed": answer.choice.sampling.seed,
            "prefill": [],
            "tokens": [_token(generation, entry) for entry in answer.logits],
            "top_tokens": [_top_tokens(generation, parameters, entry) for entry in answer.logits],
        }
    return summary


def _token(generation: Generation, entry: TokenLogits, text: str | None = None) -> dict[str, Any]:
    tokenizer = generation.state.engine.tokenizer
    return {
        "id": entry.token_id,
        "text": token_string(tokenizer, entry.token_id) if text is None else text,
        "logprob": max(entry.logprob, LOWEST),
        "special": entry.token_id in tokenizer.special_token_ids,
    }


def _top_tokens(generation: Generation, parameters: GenerateParameters, entry: TokenLogits) -> list[dict[str, Any]]:
    tokenizer = generation.state.engine.tokenizer
    return [
        {
            "id": token_id,
            "text": token_string(tokenizer, token_id),
            "logprob": max(logit - entry.logsumexp, LOWEST),
            "special": token_id in tokenizer.special_token_ids,
        }
        for token_id, logit in entry.top[: parameters.top_n_tokens or 0]
    ]


class GenerateEvents:
    """An event a token; the last one has the whole text."""

    def __init__(self, generation: Generation, parameters: GenerateParameters, inputs: str) -> None:
        self._generation = generation
        self._parameters = parameters
        self._inputs = inputs
        self._answer = Answer(generation.choices[0])
        self._texts: list[str] = []

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        """The events of the piece's tokens."""
        answer, parameters = self._answer, self._parameters
        self._texts.append(piece.text)
        answer.token_ids.extend(piece.token_ids)
        if parameters.details:
            answer.logits.extend(piece.logits)
        last: dict[str, Any] = {}
        if piece.finish_reason is not None:
            answer.finish_reason = piece.finish_reason.value
            texts = self._texts
            text = "".join([self._inputs, *texts] if parameters.return_full_text else texts)
            last = {"generated_text": text, **_summary(self._generation, parameters, answer)}
        first_index = len(answer.token_ids) - len(piece.token_ids) + 1
        return _token_events(self._generation, parameters, piece, first_index, last)

    def last(self) -> bytes:
        """The last event has said it all."""
        return b""

    def error(self, reply: ErrorReply) -> bytes:
        """After the stream has begun."""
        return dialect_error(reply)


def _token_events(
    generation: Generation,
    parameters: GenerateParameters,
    piece: RequestOutput,
    first_index: int,
    last: dict[str, Any],
) -> bytes:
    """An event a token. Of tokens that piled up, the last carries the text of all."""
    entries: Sequence[TokenLogits | None] = piece.logits or (None,)
    events = []
    for i, entry in enumerate(entries):
        is_last = i == len(entries) - 1
        token = None
        if entry is not None:
            token = _token(generation, entry, piece.text if is_last else "")
        elif piece.text:
            token = {"id": None, "text": piece.text, "logprob": None, "special": False}
        event: dict[str, Any] = {
            "index": first_index + i,
            "token": token,
            "generated_text": None,
            "details": None,
        }
        if entry is not None and parameters.top_n_tokens:
            event["top_tokens"] = _top_tokens(generation, parameters, entry)
        if entry is not None and parameters.return_logits:
            event["logits"] = step_logits([entry])
        if is_last:
            event.update(last)
        events.append(b"data:" + orjson.dumps(event) + b"\n\n")
    return b"".join(events)


def dialect_error(reply: ErrorReply) -> bytes:
    """An error after the stream has begun."""
    return b"data:" + reply.body() + b"\n\n"
