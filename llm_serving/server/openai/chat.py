"""The endpoint for conversations: ``POST /v1/chat/completions`` of OpenAI's API, with tools, reasoning and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import orjson
from pydantic import Field
from starlette.requests import Request

from llm_serving.errors import RequestError
from llm_serving.request import FinishReason, RequestOutput
from llm_serving.server.fields.prompt_end import NO_TEMPLATE, PromptEndFields
from llm_serving.server.fields.shared import IGNORED, MaxTokens, Messages, SamplingFields, TemplateValues
from llm_serving.server.fields.tools import ToolFields
from llm_serving.server.generation.answer_grammar import answer_constraint
from llm_serving.server.generation.answer_plan import (
    AnswerPlan,
    check_tool_fields,
    offered_tools,
    plan_answer,
    template_values,
)
from llm_serving.server.generation.beams import check_beam_fields, search_answers
from llm_serving.server.generation.images import read_images
from llm_serving.server.generation.logprobs import chat_entries, prompt_entries
from llm_serving.server.generation.prompt_scores import check_prompt_scores, scoring_choices
from llm_serving.server.generation.prompts import (
    Prompt,
    check_choices,
    check_prompt,
    encode_chat,
    max_output_tokens,
    template_messages,
)
from llm_serving.server.generation.sampling import Choice, base_sampling, make_choices
from llm_serving.server.generation.scheduling import tenant_of
from llm_serving.server.generation.sequences import Answer, Generation
from llm_serving.server.generation.token_rules import with_token_rules
from llm_serving.server.http.body import read_request
from llm_serving.server.http.json_pieces import EncodedList
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.http.sse import EventStream
from llm_serving.server.limits import MAX_LOGPROBS
from llm_serving.server.models.lookup import served
from llm_serving.server.openai.answer import TOOL_CALLS, DeltaWriter, message_of
from llm_serving.server.openai.stream import (
    FINISH,
    OpenAIStream,
    check_stream_options,
    choice_of,
    response_of,
    stop_reason_json,
)
from llm_serving.server.state import AnyResponse, Endpoint, ServerState


class ChatRequest(PromptEndFields, ToolFields, SamplingFields):
    """Request body of ``/v1/chat/completions``: a conversation that the assistant continues."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "moderation": (None,),
        "chat_template": (None,),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "functions": "use 'tools'",
        "function_call": "use 'tool_choice'",
        "chat_template": NO_TEMPLATE,
    }
    ignored = IGNORED
    fits_output: ClassVar[bool] = False
    """True if ``max_tokens`` may be larger than the rest of the context. The answer then ends when the context is full.
    """

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
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Number of best tokens at each position of the prompt."
    )


async def _create_chat_completion(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``POST /v1/chat/completions``: answers a conversation ``n`` times, streamed or not."""
    state.check_queue(tenant_of(request))
    body = await read_request(ChatRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    generation, plan = await start_chat(state, request, body, "chat.completions", "chatcmpl")
    if body.stream:
        return EventStream(generation, ChatStream(generation, body, plan))
    if body.use_beam_search:
        has_limit = body.max_tokens is not None or body.max_completion_tokens is not None
        work = search_answers(generation, body, None, has_limit=has_limit)
    else:
        if body.prompt_logprobs is not None:
            name, n, top = "prompt_logprobs", body.n or 1, body.prompt_logprobs
            generation.scoring = scoring_choices(state, generation.request_id, generation.choices, n, top, name)
        work = generation.answers(keep_logits=bool(body.logprobs) or bool(generation.scoring))
    answers = await run_while_connected(state.active, request.receive, work)
    if body.use_beam_search:
        for answer in answers:
            generation.note_tokens(answer.choice.index, answer.token_ids)
    num_choices = len(generation.choices)
    scoring = answers[num_choices:]
    choice, more = partial(_choice, generation, body, plan), partial(_prompt_members, generation, body, scoring)
    repeats = bool(body.return_token_ids)
    return await response_of(
        generation, "chat.completion", answers[:num_choices], choice, scoring, more, repeats_prompts=repeats
    )


async def start_chat(
    state: ServerState, request: Request, body: ChatRequest, api: str, id_prefix: str
) -> tuple[Generation, AnswerPlan | None]:
    """Prepares a chat for the engine. Returns the generation with its choices, and the plan for parsing their text.

    All APIs with conversations call this function. ``api`` is the API's name in the log. Raises RequestError, and
    UnavailableError if the server cannot serve requests now.
    """
    _check(body)
    check_tool_fields(state, body)
    generation = Generation(state, request, api, id_prefix, body, stream=bool(body.stream), model=body.model)
    generation.choices, plan = await _choices(state, body, generation)
    generation.watch_reasoning(plan)
    state.check_ready()
    return generation, plan


async def chat_prompt(state: ServerState, body: ChatRequest) -> Prompt:
    """Returns the prompt of a chat. Raises RequestError."""
    check_tool_fields(state, body)
    return await _prompt(state, body)


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/chat/completions", _create_chat_completion, "OpenAI: answer a conversation.", ChatRequest,
        '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}', queued=True,
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
    if body.prompt_logprobs is not None:
        check_prompt_scores("prompt_logprobs", stream=bool(body.stream), beams=bool(body.use_beam_search))
    check_stream_options(body)
    check_beam_fields(body)


async def _choices(
    state: ServerState, body: ChatRequest, generation: Generation
) -> tuple[list[Choice], AnswerPlan | None]:
    n = body.n or 1
    check_choices(1, n)
    prompt = await _prompt(state, body)
    plan = plan_answer(state, body, prompt)
    ids = prompt.token_ids
    check_prompt(len(ids), state.settings, "messages")
    newer = body.max_completion_tokens is not None
    wanted = body.max_completion_tokens if newer else body.max_tokens
    name = "max_completion_tokens" if newer else "max_tokens"
    if wanted is not None and body.fits_output:
        wanted = min(wanted, max_output_tokens(len(ids), None, state.settings, name))
    max_tokens = max_output_tokens(len(ids), wanted, state.settings, name)
    params = replace(
        base_sampling(body, state.settings.sampling_defaults),
        logprobs=bool(body.logprobs),
        top_logits=body.top_logprobs or 0,
        shown_token_ids=frozenset() if plan is None else plan.shown_token_ids,
    )
    tenant = generation.scheduling.tenant
    grammar = await answer_constraint(
        state, body, body, plan, tenant, ignore_eos=params.ignore_eos, beams=bool(body.use_beam_search)
    )
    constraint = await with_token_rules(state, params, max_tokens, grammar)
    sampling = [(params, max_tokens)]
    choices = make_choices(state.settings, generation.request_id, [prompt], sampling, n, body.seed, constraint)
    return choices, plan


async def _prompt(state: ServerState, body: ChatRequest) -> Prompt:
    body.check_prompt_end(body.messages, state.output_format)
    if any(message.parts for message in body.messages):
        _check_image_fields(body)
    images = await read_images(state, body.messages)
    messages = await template_messages(body.messages)
    tools = [tool.for_template() for tool in offered_tools(body)]
    values = template_values(state, body)
    continues = bool(body.continue_final_message)
    prompt = await encode_chat(
        state, messages, add_generation_prompt=body.opens_message, continues=continues, tools=tools,
        template_values=values, images=images,
    )  # fmt: skip
    return replace(prompt, continued=body.messages[-1].content) if continues else prompt


def _check_image_fields(body: ChatRequest) -> None:
    """Raises RequestError for fields that a conversation with images cannot have."""
    name = "use_beam_search" if body.use_beam_search else "prompt_logprobs"
    if body.use_beam_search or body.prompt_logprobs is not None:
        raise RequestError(
            f"'{name}' is not supported for messages with images; leave it out.", param=name, code="unsupported_value"
        )


def _prompt_members(generation: Generation, body: ChatRequest, scoring: Sequence[Answer]) -> dict[str, object]:
    """Returns the members of the response about the prompt: its token ids and log-probabilities, with vLLM's names.

    ``scoring`` are the outputs of the sequences that score the prompt.
    """
    members: dict[str, object] = {}
    if body.return_token_ids:
        members["prompt_token_ids"] = EncodedList(generation.choices[0].prompt.token_ids)
    if body.prompt_logprobs is not None:
        scores = (token for answer in scoring for token in answer.logits)
        entries = prompt_entries(generation.state.engine.tokenizer, scores, body.prompt_logprobs)
        members["prompt_logprobs"] = EncodedList(entries)
    return members


def _choice(generation: Generation, body: ChatRequest, plan: AnswerPlan | None, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if body.logprobs:
        entries = chat_entries(generation.state.engine.tokenizer, answer.logits, body.top_logprobs or 0)
        logprobs = {"content": EncodedList(entries), "refusal": None}
    if plan is None:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    else:
        message, has_calls = message_of(plan, answer.text)
        if has_calls and answer.finish_reason == FinishReason.STOP.value:
            answer = replace(answer, finish_reason=TOOL_CALLS)
    return choice_of(body, answer, {"message": message}, logprobs)


class ChatStream(OpenAIStream):
    """Formats the chunks of a streamed chat: first the role, then pieces of text, then the finish reason."""

    object = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatRequest, plan: AnswerPlan | None) -> None:
        super().__init__(generation, body)
        self._writers = {} if plan is None else {choice.index: DeltaWriter(plan) for choice in generation.choices}
        self._logprobs = body.top_logprobs or 0 if body.logprobs else None

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        events = []
        if self.count(choice, piece):
            more = b""
            if self.wants_token_ids:
                more = b',"prompt_token_ids":' + orjson.dumps(list(choice.prompt.token_ids))
            events.append(self.event(choice.index, _ROLE, self.token_ids(choice, (), first=True), more=more))
        logprobs = b"null"
        if self._logprobs is not None and piece.logits:
            entries = list(chat_entries(self.tokenizer, piece.logits, self._logprobs))
            logprobs = orjson.dumps({"content": entries, "refusal": None})
        has_more = logprobs != b"null" or bool(piece.token_ids and self.wants_token_ids)
        writer = self._writers.get(choice.index)
        if writer is None:
            deltas = [b'{"content":' + orjson.dumps(piece.text) + b"}"] if piece.text or has_more else []
        else:
            self.generation.note_tokens(choice.index, piece.token_ids)
            deltas = writer.deltas(piece.text, is_last=piece.finish_reason is not None)
            if has_more and not deltas:
                deltas = [b"{}"]
        ids = self.token_ids(choice, piece.token_ids, first=False) if deltas else b""
        for delta in deltas:
            members = (b',"delta":', delta, b',"logprobs":', logprobs, b',"finish_reason":null', ids)
            events.append(self.event(choice.index, *members))
            logprobs, ids = b"null", b""  # only the first delta of a piece has these members
        if piece.finish_reason is not None:
            reason, stop_reason = FINISH[piece.finish_reason], stop_reason_json(piece)
            if writer is not None:
                reason = writer.finish_reason(piece.finish_reason) or reason
            fields = (b',"delta":{},"logprobs":null,"finish_reason":', reason, stop_reason)
            events.append(self.event(choice.index, *fields))
        return b"".join(events)


_ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
