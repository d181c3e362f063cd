"""The endpoint that continues prompts: ``POST /v1/completions`` of OpenAI's API, without chat template and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import orjson
from pydantic import Field
from starlette.requests import Request

from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.errors import RequestError
from llm_serving.request import FinishReason, RequestOutput
from llm_serving.server.fields.shared import IGNORED, SamplingFields
from llm_serving.server.generation.beams import check_beam_fields, search_answers
from llm_serving.server.generation.logprobs import CompletionLogprobs, prompt_entries
from llm_serving.server.generation.prompt_scores import check_prompt_scores, scoring_choices, scoring_name
from llm_serving.server.generation.prompts import max_output_tokens, read_prompts
from llm_serving.server.generation.sampling import Choice, base_sampling, make_choices
from llm_serving.server.generation.scheduling import tenant_of
from llm_serving.server.generation.sequences import Answer, Generation
from llm_serving.server.generation.structured import compiled_grammar
from llm_serving.server.generation.token_rules import with_token_rules
from llm_serving.server.http.body import read_request
from llm_serving.server.http.json_pieces import EncodedList
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.http.sse import EventStream
from llm_serving.server.limits import MAX_LOGPROBS
from llm_serving.server.models.lookup import served
from llm_serving.server.openai.stream import (
    FINISH,
    OpenAIStream,
    check_stream_options,
    choice_of,
    response_of,
    stop_reason_json,
)
from llm_serving.server.state import AnyResponse, Endpoint, ServerState

DEFAULT_MAX_TOKENS = 16
"""Default of ``max_tokens`` in ``/v1/completions``."""


class CompletionRequest(SamplingFields):
    """Request body of ``/v1/completions``: one or more prompts to continue."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"suffix": (None, "")}
    ignored = IGNORED

    prompt: Any = Field(
        description="Text, token ids, or a list of either.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        },
    )
    max_tokens: int | None = Field(
        default=None, ge=0, description=f"Maximum number of tokens to generate (default {DEFAULT_MAX_TOKENS})."
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Number of best tokens with log-probabilities."
    )
    echo: bool | None = Field(
        default=None, description="Put the prompt before the text, and its log-probabilities before those of the text."
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Number of best tokens at each position of the prompt."
    )
    best_of: int | None = Field(
        default=None, ge=1, description="The value of `n`, or the number of beams of a beam search."
    )


async def _create_completion(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``POST /v1/completions``: continues each prompt ``n`` times, streamed or not."""
    state.check_queue(tenant_of(request))
    body = await read_request(CompletionRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    generation = await start_completion(state, request, body, "completions", "cmpl")
    if body.stream:
        return EventStream(generation, CompletionStream(generation, body))
    if body.use_beam_search:
        work = search_answers(generation, body, body.best_of, has_limit=body.max_tokens is not None)
    else:
        if (wanted := _prompt_scores(body)) is not None:
            n, (param, top) = body.n or 1, wanted
            generation.scoring = scoring_choices(state, generation.request_id, generation.choices, n, top, param)
            generation.is_scoring_only = body.max_tokens == 0
        work = generation.answers(keep_logits=body.logprobs is not None or bool(generation.scoring))
    answers = await run_while_connected(state.active, request.receive, work)
    num_choices = len(generation.choices)
    scoring = answers[num_choices:]
    scores = {answer.choice.request_id: answer.logits for answer in scoring}
    choice = partial(_choice, generation, body, scores)
    repeats = bool(body.echo or body.return_token_ids)
    return await response_of(
        generation, "text_completion", answers[:num_choices], choice, scoring, repeats_prompts=repeats
    )


async def start_completion(
    state: ServerState, request: Request, body: CompletionRequest, api: str, id_prefix: str
) -> Generation:
    """Prepares a completion for the engine. Returns the generation with its choices.

    All APIs that continue prompts may call this function. ``api`` is the API's name in the log. Raises RequestError,
    and UnavailableError if the server cannot serve requests now.
    """
    _check(body)
    generation = Generation(state, request, api, id_prefix, body, stream=bool(body.stream), model=body.model)
    generation.choices = await _choices(state, body, generation)
    state.check_ready()
    return generation


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/completions", _create_completion, "OpenAI: continue prompts.", CompletionRequest,
        '{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}', queued=True,
    ),
)  # fmt: skip


def _check(body: CompletionRequest) -> None:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n and not body.use_beam_search:
        raise RequestError(
            f"'best_of' is {body.best_of} and n is {n}; only equal values are supported.",
            param="best_of",
            code="unsupported_parameter",
        )
    wanted = _prompt_scores(body)
    if wanted is not None:
        check_prompt_scores(wanted[0], stream=bool(body.stream), beams=bool(body.use_beam_search))
    elif body.max_tokens == 0:
        raise RequestError(
            "'max_tokens' should be greater than or equal to 1; got 0. Only a request for log-probabilities of the "
            "prompt ('echo' with 'logprobs', or 'prompt_logprobs') may have 0.",
            param="max_tokens",
            code="invalid_value",
        )
    check_stream_options(body)
    check_beam_fields(body)


def _prompt_scores(body: CompletionRequest) -> tuple[str, int] | None:
    """Returns the field that asks for log-probabilities of the prompt, and the number of best tokens for each position.

    The field is ``echo`` (with ``logprobs``) or ``prompt_logprobs``. Returns None if the request asks for neither.
    """
    echoed = body.logprobs if body.echo else None
    if echoed is None and body.prompt_logprobs is None:
        return None
    return "prompt_logprobs" if echoed is None else "echo", max(echoed or 0, body.prompt_logprobs or 0)


async def _choices(state: ServerState, body: CompletionRequest, generation: Generation) -> list[Choice]:
    n = body.n or 1
    prompts = await read_prompts(state, body.prompt, n)
    params = replace(
        base_sampling(body, state.settings.sampling_defaults),
        logprobs=body.logprobs is not None,
        top_logits=body.logprobs or 0,
    )
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = []
    for prompt in prompts:
        maximum = max_output_tokens(len(prompt.token_ids), body.max_tokens, state.settings, "max_tokens")
        sampling.append((params, min(wanted, maximum)))
    grammar = await compiled_grammar(state, body, generation.scheduling.tenant, ignore_eos=params.ignore_eos)
    constraint = await with_token_rules(state, params, min(most for _, most in sampling), grammar)
    return make_choices(state.settings, generation.request_id, prompts, sampling, n, body.seed, constraint)


def _choice(
    generation: Generation, body: CompletionRequest, scores: Mapping[str, LogitColumns], answer: Answer
) -> dict[str, Any]:
    """Returns one choice as JSON. ``scores`` maps the name of a scoring sequence to the scores of its prompt."""
    tokenizer, choice = generation.state.engine.tokenizer, answer.choice
    if generation.is_scoring_only:
        answer.finish_reason = FinishReason.LENGTH.value
    prompt_logits = scores.get(scoring_name(generation.request_id, choice.index // (body.n or 1)), LogitColumns())
    logprobs = None
    if body.logprobs is not None:
        formatted = CompletionLogprobs(tokenizer, choice, body.logprobs)
        logprobs = formatted.echoed(prompt_logits, answer.logits) if body.echo else formatted.encoded(answer.logits)
    text = (choice.prompt.as_text(tokenizer) if body.echo else "") + answer.text
    output: dict[str, Any] = {"text": text}
    if body.prompt_logprobs is not None:
        output["prompt_logprobs"] = EncodedList(prompt_entries(tokenizer, prompt_logits, body.prompt_logprobs))
    return choice_of(body, answer, output, logprobs)


class CompletionStream(OpenAIStream):
    """Formats the chunks of a streamed completion."""

    object = "text_completion"

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(generation, body)
        self._echo = bool(body.echo)
        self._logprobs: list[CompletionLogprobs] = []
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(self.tokenizer, c, body.logprobs) for c in generation.choices]

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        first = self.count(choice, piece)
        text = choice.prompt.as_text(self.tokenizer) + piece.text if first and self._echo else piece.text
        logprobs = b"null"
        if self._logprobs and piece.logits:
            logprobs = orjson.dumps(self._logprobs[choice.index].take(piece.logits))
        elif not text and piece.finish_reason is None and not (piece.token_ids and self.wants_token_ids):
            return b""
        return self.event(
            choice.index,
            b',"text":',
            orjson.dumps(text),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            FINISH[piece.finish_reason],
            stop_reason_json(piece),
            self.token_ids(choice, piece.token_ids, first),
        )
