"""``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import RequestError
from llm_serving.request import RequestOutput
from llm_serving.server.beams import check_beam_fields, search_answers
from llm_serving.server.body import read_json_object
from llm_serving.server.choices import Answer, Choice, check_choices, make_choices
from llm_serving.server.generation import Generation
from llm_serving.server.lifecycle import run_while_connected
from llm_serving.server.models import check_model
from llm_serving.server.openai_logprobs import CompletionLogprobs
from llm_serving.server.openai_stream import (
    OpenAIStream,
    check_stream_options,
    finish_json,
    stop_reason_json,
    usage_of,
)
from llm_serving.server.prompts import parse_prompts, resolve_prompts
from llm_serving.server.protocol_openai import CompletionRequest
from llm_serving.server.responses import json_response
from llm_serving.server.sampling import base_sampling, output_room
from llm_serving.server.sse import EventStream
from llm_serving.server.state import ServerState
from llm_serving.server.validation import parse

__all__ = ["create_completion"]

DEFAULT_MAX_TOKENS = 16


async def create_completion(state: ServerState, request: Request) -> Response | EventStream:
    """Continues each prompt ``n`` times."""
    state.require_room()
    body = parse(CompletionRequest, await read_json_object(request, state.settings.max_body_bytes))
    check_model(state, body.model)
    _check(body)
    generation = Generation(state, request, "completions", "cmpl", body, stream=bool(body.stream))
    generation.choices = await _choices(state, body, generation.request_id)
    state.require_ready()
    if body.stream:
        return EventStream(generation, CompletionStream(generation, body))
    if body.use_beam_search:
        work = search_answers(generation, body, body.best_of, has_limit=body.max_tokens is not None)
    else:
        work = generation.answers(keep_logits=body.logprobs is not None)
    answers = await run_while_connected(state.active, request.receive, work)
    return json_response(_response(generation, body, answers), generation.request_id)


def _check(body: CompletionRequest) -> None:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n and not body.use_beam_search:
        raise RequestError(
            f"'best_of' is {body.best_of} and n is {n}; only equal values are supported.",
            param="best_of",
            code="unsupported_parameter",
        )
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "'echo' with 'logprobs' is not supported: there are no log-probabilities of prompt tokens.",
            param="echo",
            code="unsupported_parameter",
        )
    check_stream_options(body)
    check_beam_fields(body)


async def _choices(state: ServerState, body: CompletionRequest, request_id: str) -> list[Choice]:
    raw = parse_prompts(body.prompt)
    n = body.n or 1
    check_choices(len(raw), n)
    prompts = await resolve_prompts(state, raw, "prompt")
    params = replace(base_sampling(body), logprobs=body.logprobs is not None, top_logits=body.logprobs or 0)
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = []
    for prompt in prompts:
        room = output_room(len(prompt.token_ids), body.max_tokens, state.settings, "max_tokens")
        sampling.append((params, min(wanted, room)))
    return make_choices(request_id, prompts, sampling, n, body.seed)


def _response(generation: Generation, body: CompletionRequest, answers: list[Answer]) -> dict[str, Any]:
    return {
        "id": generation.request_id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.state.engine.model_name,
        "choices": [_choice(generation, body, answer) for answer in answers],
        **usage_of(generation, answers),
    }


def _choice(generation: Generation, body: CompletionRequest, answer: Answer) -> dict[str, Any]:
    tokenizer = generation.state.engine.tokenizer
    choice = answer.choice
    logprobs = None
    if body.logprobs is not None:
        logprobs = CompletionLogprobs(tokenizer, choice, body.logprobs).take(answer.logits)
    result: dict[str, Any] = {
        "index": choice.index,
        "text": (choice.prompt.as_text(tokenizer) if body.echo else "") + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if body.return_token_ids:
        result["token_ids"] = answer.token_ids
        result["prompt_token_ids"] = list(choice.prompt.token_ids)
    return result


class CompletionStream(OpenAIStream):
    """The chunks of a completion."""

    object = "text_completion"

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(generation, body)
        self._echo = bool(body.echo)
        self._logprobs: list[CompletionLogprobs] = []
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(self.tokenizer, c, body.logprobs) for c in generation.choices]

    def chunk(self, choice: Choice, piece: RequestOutput, first: bool) -> bytes:
        text = choice.prompt.as_text(self.tokenizer) + piece.text if first and self._echo else piece.text
        logprobs = b"null"
        if self._logprobs and piece.logits:
            logprobs = orjson.dumps(self._logprobs[choice.index].take(piece.logits))
        elif not text and not piece.finished and not (piece.token_ids and self.wants_token_ids):
            return b""
        return self.event(
            choice.index,
            b',"text":',
            orjson.dumps(text),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            finish_json(piece.finish_reason),
            stop_reason_json(piece),
            self.token_ids(choice, piece.token_ids, first),
        )
