"""The endpoints ``/chat`` and ``/stream_chat_post``, with the requests and responses of MindSpore llm-serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from llm_serving.errors import ContextLengthError
from llm_serving.request import RequestOutput
from llm_serving.server.error_replies import ErrorReply
from llm_serving.server.fields.shared import DialectSampling, MaxTokens
from llm_serving.server.fields.validation import LaxModel
from llm_serving.server.generation.logprobs import step_logits
from llm_serving.server.generation.prompts import Prompt, check_prompt, check_vocabulary, encode_chat, max_output_tokens
from llm_serving.server.generation.sampling import Choice, dialect_sampling, make_choices
from llm_serving.server.generation.scheduling import SchedulingFields, tenant_of
from llm_serving.server.generation.sequences import Generation, count_items
from llm_serving.server.http.body import read_request, whole_response
from llm_serving.server.http.json_pieces import EncodedList
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.http.sse import EventStream
from llm_serving.server.limits import MAX_MESSAGES, MAX_NAME_CHARS, MAX_PREFIX_IDS
from llm_serving.server.models.lookup import served
from llm_serving.server.state import AnyResponse, Endpoint, ServerState

OBSERVATION = "observation"
"""Role of a message with the result of a tool."""
END_FLAG = "end"
"""Value of the member ``flag`` in the last event of a stream, and in a response that is not streamed."""
Role = Literal["system", "user", "assistant", "observation"]


class Turn(LaxModel):
    """One message of the field ``history`` of ``/chat``."""

    role: Role
    content: str


def _turns(value: object) -> object:
    """Returns ``history`` as a list of messages. Clients send objects with role and content, or pairs of strings."""
    if value is None:
        return []
    if not isinstance(value, list):
        return value
    turns: list[object] = []
    for i, entry in enumerate(value):
        if isinstance(entry, list):
            if len(entry) != 2 or not all(isinstance(text, str) for text in entry):
                raise PydanticCustomError(
                    "history_pair", f"holds an entry [{i}] that is not a [query, answer] pair of strings"
                )
            turns += [{"role": "user", "content": entry[0]}, {"role": "assistant", "content": entry[1]}]
        else:
            turns.append(entry)
    return turns


History = Annotated[
    list[Turn],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_turns),
    WithJsonSchema({"type": "array", "items": {"anyOf": [{"type": "object"}, {"type": "array"}]}}),
]


PrefixIds = Annotated[list[int], Field(max_length=MAX_PREFIX_IDS, fail_fast=True)]


class GenerationSettings(DialectSampling):
    """The field ``gen_kwargs`` of ``/chat``: sampling parameters and limits."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "num_beams": (None, 1),
        "num_return_sequences": (None, 1),
    }

    max_length: MaxTokens = Field(
        default=None, description="Maximum length of the conversation in tokens, prompt and output together."
    )
    max_new_tokens: MaxTokens = Field(
        default=None,
        description="Maximum number of tokens to generate. With `max_length`, the limit that is reached first applies.",
    )
    prefix_text: str | PrefixIds | None = Field(
        default=None,
        description="Start of the response, as text or as token ids. The model continues it; the response does not "
        "repeat it.",
    )


class ChatDialectRequest(SchedulingFields, LaxModel):
    """Request body of ``/chat``: a question and the conversation before it."""

    request_id: Annotated[  # ``max_length`` must come before the validator; otherwise pydantic fails for null
        str | None,
        Field(max_length=MAX_NAME_CHARS, description="Returned with the response."),
        BeforeValidator(lambda value: str(value) if type(value) is int else value),
    ] = None
    query: str
    role: Role = Field(default="user", description="Role of the query's author.")
    history: History = Field(
        default=[], description="Earlier messages: {role, content} objects or [query, answer] pairs."
    )
    gen_kwargs: GenerationSettings | None = None
    stream: bool | None = Field(default=None, description="On `/chat`: respond as `/stream_chat_post` does.")


async def chat(state: ServerState, request: Request, *, stream: bool = False) -> AnyResponse:
    """Handles ``/chat``: answers the question. With ``stream``, sends the answer piece by piece as events."""
    state.check_queue(tenant_of(request))
    body = await read_request(ChatDialectRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, None, body)
    settings = body.gen_kwargs or GenerationSettings()
    stream = stream or bool(body.stream)
    generation = Generation(state, request, "chat", "chat", body, stream=stream)
    if body.request_id is not None:
        generation.on_close = state.chat_ids.claim(tenant_of(request), body.request_id)
    generation.choices = await _choices(state, body, settings, generation.request_id)
    state.check_ready()
    request_id = generation.request_id if body.request_id is None else body.request_id
    if stream:
        return EventStream(generation, ChatEvents(generation, settings, request_id))
    return await _answer(state, request, generation, settings, request_id)


async def _stream_chat(state: ServerState, request: Request) -> AnyResponse:
    return await chat(state, request, stream=True)


_EXAMPLE = '{"request_id": "1", "query": "Hello!", "role": "user", "history": [], "gen_kwargs": {"max_new_tokens": 64}}'

ENDPOINTS = (
    Endpoint("POST", "/chat", chat, "Answer a question in a conversation.", ChatDialectRequest, _EXAMPLE, queued=True),
    Endpoint(
        "POST", "/stream_chat_post", _stream_chat,
        "Answer a question in a conversation, piece by piece.", ChatDialectRequest, _EXAMPLE, queued=True,
    ),
)  # fmt: skip


async def _choices(
    state: ServerState, body: ChatDialectRequest, settings: GenerationSettings, request_id: str
) -> list[Choice]:
    prompt = await _prompt(state, body, settings.prefix_text)
    ids = prompt.token_ids
    check_prompt(len(ids), state.settings, "messages")
    limit, name = _output_limit(settings, len(ids))
    max_tokens = max_output_tokens(len(ids), limit, state.settings, name)
    return make_choices(
        state.settings, request_id, [prompt], [(dialect_sampling(settings), max_tokens)], 1, settings.seed
    )


async def _prompt(state: ServerState, body: ChatDialectRequest, prefix: str | list[int] | None) -> Prompt:
    """Returns the prompt of a conversation. It ends with ``prefix``, which the model continues. Raises RequestError."""
    turns = [*body.history, Turn(role=body.role, content=body.query)]
    role = _observation_role(state.engine.tokenizer.chat_template.source)
    messages = [{"role": role if turn.role == OBSERVATION else turn.role, "content": turn.content} for turn in turns]
    if not isinstance(prefix, list):
        return await encode_chat(state, messages, suffix=prefix or "")
    check_vocabulary(prefix, state.settings.vocab_size, "gen_kwargs.prefix_text")
    prompt = await encode_chat(state, messages)
    return Prompt([*prompt.token_ids, *prefix])


def _observation_role(template: str | None) -> str:
    """Returns the role of a tool's result in a chat template: ``observation`` as in ChatGLM's template, or ``tool``."""
    return OBSERVATION if template is not None and OBSERVATION in template else "tool"


async def _answer(
    state: ServerState, request: Request, generation: Generation, settings: GenerationSettings, request_id: str
) -> AnyResponse:
    work = generation.answers(keep_logits=bool(settings.return_logits))
    [answer] = await run_while_connected(state.active, request.receive, work)
    result: dict[str, Any] = {
        "request_id": request_id,
        "response": answer.text,
        "finish_reason": answer.finish_reason,
        "flag": END_FLAG,
        "usage": _usage(generation, len(answer.token_ids)),
    }
    if generation.return_receipt:
        result["receipt"] = generation.receipt()

    def build() -> dict[str, Any]:
        return result | ({"logits": EncodedList(step_logits(answer.logits))} if settings.return_logits else {})

    return await whole_response(generation.request_id, count_items([answer]), build)


def _usage(generation: Generation, num_output_tokens: int) -> dict[str, int]:
    num_prompt_tokens = generation.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def _output_limit(settings: GenerationSettings, num_prompt_tokens: int) -> tuple[int | None, str]:
    """Returns the maximum number of new tokens, and the name of the setting that sets it.

    The setting ``max_length`` limits prompt and new tokens together, ``max_new_tokens`` only the new ones. Raises
    ContextLengthError if the prompt alone reaches ``max_length``.
    """
    name, limit = "gen_kwargs.max_new_tokens", settings.max_new_tokens
    if settings.max_length is None:
        return limit, name
    rest = settings.max_length - num_prompt_tokens
    if rest < 1:
        raise ContextLengthError(
            f"gen_kwargs.max_length is {settings.max_length} tokens for prompt and output together, and the prompt has "
            f"{num_prompt_tokens}. Raise gen_kwargs.max_length above {num_prompt_tokens}, or use "
            "gen_kwargs.max_new_tokens, which counts only the output.",
            param="gen_kwargs.max_length",
        )
    return (rest, "gen_kwargs.max_length") if limit is None or rest < limit else (limit, name)


class ChatEvents:
    """Formats the events of ``/stream_chat_post``. The member ``delta`` of an event has the new text.

    The last event has ``"flag": "end"``, the whole ``response``, the finish reason and the token counts.
    """

    def __init__(self, generation: Generation, settings: GenerationSettings, request_id: str) -> None:
        self._generation = generation
        self._return_logits = bool(settings.return_logits)
        self._request_id = request_id
        self._texts: list[str] = []
        self._num_tokens = 0

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        self._texts.append(piece.text)
        self._num_tokens += len(piece.token_ids)
        event: dict[str, Any] = {"request_id": self._request_id, "delta": piece.text, "finish_reason": None}
        if self._return_logits:
            event["logits"] = list(step_logits(piece.logits))
        if piece.finish_reason is not None:
            event["finish_reason"] = piece.finish_reason.value
            event["flag"] = END_FLAG
            event["response"] = "".join(self._texts)
            event["usage"] = _usage(self._generation, self._num_tokens)
            if self._generation.return_receipt:
                event["receipt"] = self._generation.receipt()
        elif not piece.text and not self._return_logits:
            return b""
        return b"data: " + orjson.dumps(event) + b"\n\n"

    def last(self) -> bytes:
        return b""

    def error(self, reply: ErrorReply) -> bytes:
        return b"data:" + reply.body() + b"\n\n"
