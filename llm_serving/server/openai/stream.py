"""The common part of ``/v1/chat/completions`` and ``/v1/completions``: responses, token counts, streamed chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import orjson

from llm_serving.errors import RequestError
from llm_serving.request import FinishReason, RequestOutput
from llm_serving.server.error_replies import ErrorReply
from llm_serving.server.fields.shared import SamplingFields
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.sequences import Answer, Generation, count_items, count_prompt_items
from llm_serving.server.http.body import whole_response
from llm_serving.server.http.json_pieces import EncodedList
from llm_serving.server.state import AnyResponse

DONE = b"data: [DONE]\n\n"

FINISH = {None: b"null", FinishReason.STOP: b'"stop"', FinishReason.LENGTH: b'"length"'}
"""Maps the finish reason of a piece to its JSON. A piece that is not the last one has the finish reason None."""


async def response_of(
    generation: Generation,
    kind: str,
    answers: Sequence[Answer],
    choice: Callable[[Answer], dict[str, Any]],
    scoring: Sequence[Answer] = (),
    more: Callable[[], dict[str, object]] | None = None,
    *,
    repeats_prompts: bool,
) -> AnyResponse:
    """Returns a response that is not streamed.

    ``kind`` is the value of the member ``object``, OpenAI's name for the kind of a response. The function ``choice``
    converts an answer to an element of the list ``choices``. The function ``more`` returns further members of the
    response. If the response is long, another thread calls both functions. ``scoring`` are the outputs of the sequences
    that score prompts. ``repeats_prompts`` is True if each choice has the text or the token ids of its prompt.
    """
    num_output_tokens = sum(len(answer.token_ids) for answer in answers)
    head, tail = _head(generation, kind), {"usage": _usage(generation, num_output_tokens)}
    if generation.return_receipt:
        tail["receipt"] = generation.receipt()

    def build() -> dict[str, Any]:
        members: dict[str, Any] = {} if more is None else more()
        return head | {"choices": [choice(answer) for answer in answers]} | tail | members

    num_items = count_items(answers) + sum(len(answer.logits) for answer in scoring)
    if repeats_prompts:
        num_items += count_prompt_items(answers)
    return await whole_response(generation.request_id, num_items, build)


def choice_of(request: SamplingFields, answer: Answer, output: dict[str, Any], logprobs: object) -> dict[str, Any]:
    """Returns one member of ``choices`` in a response. ``output`` is the member with the generated text or message."""
    choice = {
        "index": answer.choice.index,
        **output,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = EncodedList(answer.token_ids)
        choice["prompt_token_ids"] = EncodedList(answer.choice.prompt.token_ids)
    return choice


def stop_reason_json(piece: RequestOutput) -> bytes:
    """Returns the JSON member ``stop_reason`` for the last piece of a choice, and empty bytes for other pieces.

    Its value is the stop string or token id that ended the text, or null.
    """
    return b',"stop_reason":' + orjson.dumps(piece.stop_reason) if piece.finish_reason is not None else b""


def check_stream_options(request: SamplingFields) -> None:
    """Raises RequestError for ``stream_options`` without ``stream``."""
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options", code="invalid_value"
        )


class OpenAIStream(ABC):
    """Formats a streamed response of OpenAI's API. The constant parts of a chunk are encoded once for each stream."""

    object: ClassVar[str]

    def __init__(self, generation: Generation, request: SamplingFields) -> None:
        self.generation = generation
        self.tokenizer = generation.state.engine.tokenizer
        self.wants_token_ids = bool(request.return_token_ids)
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._open = b"data: " + orjson.dumps(_head(generation, self.object))[:-1]
        self._head = self._open + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
        self._started: set[int] = set()
        self._num_output_tokens = 0

    @abstractmethod
    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        """Returns the chunks of a piece as bytes. An implementation must call ``count`` first."""

    def last(self) -> bytes:
        """Returns the end of the stream: usage and receipt, if the request asked for them, and then ``[DONE]``."""
        wanted = self._include_usage or self.generation.return_receipt
        return self._usage_chunk() + DONE if wanted else DONE

    def error(self, reply: ErrorReply) -> bytes:
        """Returns an error as the end of the stream. Clients raise an error at the key ``error``, and stop at
        ``[DONE]``."""
        return b"data: " + reply.body() + b"\n\n" + DONE

    def count(self, choice: Choice, piece: RequestOutput) -> bool:
        """Counts the tokens of a piece for the usage. Returns True for the first piece of a choice."""
        self._num_output_tokens += len(piece.token_ids)
        if choice.index in self._started:
            return False
        self._started.add(choice.index)
        return True

    def event(self, index: int, *fields: bytes, more: bytes = b"") -> bytes:
        """Returns one chunk for choice ``index``. ``fields`` are encoded JSON members, each with a comma before it.

        ``more`` are further members, which belong to the chunk and not to the choice.
        """
        return b"".join((self._head, b"%d" % index, *fields, b"}]", more, self._tail))

    def token_ids(self, choice: Choice, token_ids: Sequence[int], first: bool) -> bytes:
        """Returns the JSON member ``token_ids`` if the request asked for it, otherwise empty bytes.

        If ``first`` is True, the result also has the member ``prompt_token_ids``.
        """
        if not self.wants_token_ids:
            return b""
        members: dict[str, Any] = {"token_ids": list(token_ids)}
        if first:
            members["prompt_token_ids"] = list(choice.prompt.token_ids)
        return b"," + orjson.dumps(members)[1:-1]

    def _usage_chunk(self) -> bytes:
        members: dict[str, Any] = {"choices": [], "usage": _usage(self.generation, self._num_output_tokens)}
        if self.generation.return_receipt:
            members["receipt"] = self.generation.receipt()
        return self._open + b"," + orjson.dumps(members)[1:] + b"\n\n"


def _head(generation: Generation, kind: str) -> dict[str, Any]:
    """Returns the first members of a response or of a chunk. ``kind`` is the value of the member ``object``."""
    return {
        "id": generation.request_id,
        "object": kind,
        "created": generation.created,
        "model": generation.model_name,
    }


def _usage(generation: Generation, num_output_tokens: int) -> dict[str, Any]:
    """Returns the member ``usage`` of a response: OpenAI's token counts."""
    num_prompt_tokens = generation.num_prompt_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
    if (num_reasoning_tokens := generation.num_reasoning_tokens) is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage
