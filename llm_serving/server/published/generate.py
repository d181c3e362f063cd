"""The endpoints ``/models/{name}/generate`` and ``/models/{name}/generate_stream``, as in MindSpore llm-serving.

The URLs also work without ``/models/{name}``. A stream has one event for each token,
``data:{"token": {...}, "generated_text": null, ...}``. The last event has the whole ``generated_text``. The ``text`` of
a token is the text that became complete with the token. It is empty if the token ends inside a character. So the texts
of all tokens, joined, are ``generated_text``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field
from starlette.requests import Request

from llm_serving.request import RequestOutput, TokenLogits
from llm_serving.sampling_params import MAX_TOP_LOGITS
from llm_serving.server.error_replies import ErrorReply
from llm_serving.server.fields.shared import DialectSampling, MaxTokens
from llm_serving.server.fields.validation import LaxModel
from llm_serving.server.generation.logprobs import LOWEST, step_logits, token_string
from llm_serving.server.generation.prompts import max_output_tokens, resolve_prompts
from llm_serving.server.generation.sampling import Choice, dialect_sampling, make_choices
from llm_serving.server.generation.scheduling import SchedulingFields, tenant_of, visit_of
from llm_serving.server.generation.sequences import Answer, Generation, count_items
from llm_serving.server.http.body import read_request, whole_response
from llm_serving.server.http.json_pieces import EncodedList, encode_in_pieces
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.http.sse import EventStream
from llm_serving.server.models.lookup import served
from llm_serving.server.state import AnyResponse, Endpoint, ServerState

DEFAULT_MAX_NEW_TOKENS = 300
"""Default of ``max_new_tokens`` in ``/models/{name}/generate``."""


class GenerateParameters(DialectSampling):
    """The field ``parameters`` of ``/generate``: sampling parameters, limits and details of the response."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "best_of": (None, 1),
        "truncate": (None, False, "False"),
        "typical_p": (None, 0, 1),
        "watermark": (None, False, "False"),
        "decoder_input_details": (None, False, "False"),
        "grammar": (None,),
        "adapter_id": (None,),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "adapter_id": "send the request to /models/NAME/generate, where NAME is the name of the adapter"
    }
    ignored = frozenset({"return_protocol"})

    max_new_tokens: MaxTokens = Field(
        default=None,
        description=f"Maximum number of tokens (default {DEFAULT_MAX_NEW_TOKENS}, or the rest of the context).",
    )
    return_full_text: bool | None = Field(default=None, description="Put the prompt before `generated_text`.")
    details: bool | None = Field(default=None, description="Return the tokens with their log-probabilities.")
    top_n_tokens: int | None = Field(
        default=None, ge=0, le=MAX_TOP_LOGITS, description="Number of best tokens, in details and in a stream."
    )


class GenerateRequest(SchedulingFields, LaxModel):
    """Request body of ``/generate``: a prompt to continue."""

    inputs: Annotated[str, Field(description="The prompt.")]
    parameters: GenerateParameters | None = None
    stream: bool | None = Field(default=None, description="On `/generate`: respond as `/generate_stream` does.")


async def generate(state: ServerState, request: Request, *, stream: bool = False) -> AnyResponse:
    """Handles ``/generate``: continues the prompt ``inputs``. With ``stream``, sends an event for each token."""
    state.check_model(request.path_params.get("name"), visit_of(request))
    state.check_queue(tenant_of(request))
    body = await read_request(GenerateRequest, request, state.settings.max_body_bytes)
    parameters = body.parameters or GenerateParameters()
    stream = stream or bool(body.stream)
    model = request.path_params.get("name")
    state = await served(state, request, model, body)
    generation = Generation(state, request, "generate", "gen", body, stream=stream, model=model)
    [prompt] = await resolve_prompts(state, [body.inputs], "inputs")
    name = "parameters.max_new_tokens"
    max_tokens = max_output_tokens(len(prompt.token_ids), parameters.max_new_tokens, state.settings, name)
    if parameters.max_new_tokens is None:
        max_tokens = min(max_tokens, DEFAULT_MAX_NEW_TOKENS)
    keep = bool(parameters.details or parameters.return_logits)
    sampling = dialect_sampling(parameters, parameters.top_n_tokens or 0, logprobs=stream or keep)
    generation.choices = make_choices(
        state.settings, generation.request_id, [prompt], [(sampling, max_tokens)], 1, parameters.seed
    )
    state.check_ready()
    if stream:
        return EventStream(generation, GenerateEvents(generation, parameters, body.inputs))
    [answer] = await run_while_connected(state.active, request.receive, generation.answers(keep_logits=keep))
    text = body.inputs + answer.text if parameters.return_full_text else answer.text
    receipt = {"receipt": generation.receipt()} if generation.return_receipt else {}

    def build() -> dict[str, Any]:
        details = _Details(generation, parameters)
        details.add(answer.logits)
        result = {"generated_text": text, **_summary(answer, details.lists(), receipt)}
        if parameters.return_logits:
            result["logits"] = EncodedList(step_logits(answer.logits))
        return result

    return await whole_response(generation.request_id, count_items([answer]), build)


async def _generate_stream(state: ServerState, request: Request) -> AnyResponse:
    return await generate(state, request, stream=True)


_EXAMPLE = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32, "do_sample": false}}'
_SUMMARY, _STREAM_SUMMARY = "Continue a prompt.", "Continue a prompt, token by token."

ENDPOINTS = (
    Endpoint("POST", "/models/{name}/generate", generate, _SUMMARY, GenerateRequest, _EXAMPLE),
    Endpoint(
        "POST", "/models/{name}/generate_stream", _generate_stream, _STREAM_SUMMARY, GenerateRequest, _EXAMPLE
    ),
    Endpoint("POST", "/generate", generate, _SUMMARY, GenerateRequest, _EXAMPLE, queued=True),
    Endpoint("POST", "/generate_stream", _generate_stream, _STREAM_SUMMARY, GenerateRequest, _EXAMPLE, queued=True),
)  # fmt: skip


def _summary(answer: Answer, details: Mapping[str, EncodedList] | None, receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON members next to ``generated_text``: finish reason, number of tokens, seed, details and receipt.

    ``details`` has the lists of tokens. If it is None, the request did not ask for details, and the member is null.
    ``receipt`` is ``{"receipt": ...}``, or empty if the request did not ask for it.
    """
    figures = {
        "finish_reason": answer.finish_reason,
        "generated_tokens": len(answer.token_ids),
        "seed": answer.choice.sampling.seed,
    }
    summary: dict[str, Any] = {**figures, "details": None, **receipt}
    if details is not None:
        summary["details"] = {**figures, "prefill": [], **details}
    return summary


def _token(generation: Generation, token_id: int, logprob: float, text: str | None = None) -> dict[str, Any]:
    tokenizer = generation.state.engine.tokenizer
    return {
        "id": token_id,
        "text": token_string(tokenizer, token_id) if text is None else text,
        "logprob": max(logprob, LOWEST),
        "special": token_id in tokenizer.special_token_ids,
    }


def _top_tokens(generation: Generation, parameters: GenerateParameters, entry: TokenLogits) -> list[dict[str, Any]]:
    best = entry.top[: parameters.top_n_tokens or 0]
    return [_token(generation, token_id, logit - entry.logsumexp) for token_id, logit in best]


class _Details:
    """The lists of tokens in ``details``.

    Each token is encoded when it is added, so that making the last event of a stream takes little time.
    """

    def __init__(self, generation: Generation, parameters: GenerateParameters) -> None:
        self._generation = generation
        self._parameters = parameters
        self._tokens: list[bytes] = []
        self._top_tokens: list[bytes] = []

    def add(self, entries: Iterable[TokenLogits]) -> None:
        """Adds the next tokens, if the request asked for details."""
        if not self._parameters.details:
            return
        for entry in entries:
            self._tokens.append(orjson.dumps(_token(self._generation, entry.token_id, entry.logprob)))
            self._top_tokens.append(orjson.dumps(_top_tokens(self._generation, self._parameters, entry)))

    def lists(self) -> dict[str, EncodedList] | None:
        """Returns the members of ``details`` with lists. None if the request did not ask for details."""
        if not self._parameters.details:
            return None
        return {
            "tokens": EncodedList.of_encoded(self._tokens),
            "top_tokens": EncodedList.of_encoded(self._top_tokens),
        }


class GenerateEvents:
    """Formats the events of ``/generate_stream``: one event for each token. The last event has the whole text."""

    def __init__(self, generation: Generation, parameters: GenerateParameters, inputs: str) -> None:
        self._generation = generation
        self._parameters = parameters
        self._inputs = inputs
        self._answer = Answer(generation.choices[0])
        self._details = _Details(generation, parameters)
        self._texts: list[str] = []

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        answer, parameters = self._answer, self._parameters
        self._texts.append(piece.text)
        answer.token_ids.extend(piece.token_ids)
        self._details.add(piece.logits)
        last: dict[str, Any] = {}
        if piece.finish_reason is not None:
            answer.finish_reason = piece.finish_reason.value
            texts = self._texts
            text = "".join([self._inputs, *texts] if parameters.return_full_text else texts)
            receipt = {"receipt": self._generation.receipt()} if self._generation.return_receipt else {}
            last = {"generated_text": text, **_summary(answer, self._details.lists(), receipt)}
        first_index = len(answer.token_ids) - len(piece.token_ids) + 1
        return self._token_events(piece, first_index, last)

    def last(self) -> bytes:
        return b""

    def error(self, reply: ErrorReply) -> bytes:
        return b"data:" + reply.body() + b"\n\n"

    def _token_events(self, piece: RequestOutput, first_index: int, last: dict[str, Any]) -> bytes:
        """Returns an event for each token of a piece. The event of the last token has the text of the whole piece."""
        parameters = self._parameters
        entries: Sequence[TokenLogits | None] = piece.logits or (None,)
        events: list[bytes] = []
        for i, entry in enumerate(entries):
            is_last = i == len(entries) - 1
            token = None
            if entry is not None:
                token = _token(self._generation, entry.token_id, entry.logprob, piece.text if is_last else "")
            elif piece.text:
                token = {"id": None, "text": piece.text, "logprob": None, "special": False}
            event: dict[str, Any] = {
                "index": first_index + i,
                "token": token,
                "generated_text": None,
                "details": None,
            }
            if entry is not None and parameters.top_n_tokens:
                event["top_tokens"] = _top_tokens(self._generation, parameters, entry)
            if entry is not None and parameters.return_logits:
                event["logits"] = list(step_logits([entry]))
            if is_last:
                event.update(last)
            events += (b"data:", *encode_in_pieces(event), b"\n\n")
        return b"".join(events)
