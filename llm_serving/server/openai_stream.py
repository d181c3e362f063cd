"""What the two streams of OpenAI's API share. The constant parts of a chunk are encoded once a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from llm_serving.errors import RequestError
from llm_serving.request import FinishReason, RequestOutput
from llm_serving.server.choices import Answer, Choice
from llm_serving.server.errors import ErrorReply
from llm_serving.server.generation import Generation
from llm_serving.server.protocol import SamplingFields

__all__ = [
    "DONE",
    "OpenAIStream",
    "check_stream_options",
    "finish_json",
    "stop_reason_json",
    "usage_of",
]

DONE = b"data: [DONE]\n\n"

_FINISH = {None: b"null", FinishReason.STOP: b'"stop"', FinishReason.LENGTH: b'"length"'}


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """OpenAI's token counts."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def usage_of(generation: Generation, answers: Sequence[Answer]) -> dict[str, Any]:
    """The counts of a whole response, and its receipt where that was asked for: members of the response."""
    num_output_tokens = sum(len(answer.token_ids) for answer in answers)
    members: dict[str, Any] = {
        "usage": usage(generation.num_prompt_tokens, num_output_tokens, generation.num_cached_tokens)
    }
    if generation.return_receipt:
        members["receipt"] = generation.receipt()
    return members


def finish_json(reason: FinishReason | None) -> bytes:
    """``finish_reason`` of a piece."""
    return _FINISH[reason]


def stop_reason_json(piece: RequestOutput) -> bytes:
    """``stop_reason`` of a last piece: the stop string or token id that ended the text, or null."""
    return b',"stop_reason":' + orjson.dumps(piece.stop_reason) if piece.finished else b""


def check_stream_options(request: SamplingFields) -> None:
    """``stream_options`` says how to stream, so it needs ``stream``. Raises RequestError."""
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options", code="invalid_value"
        )


class OpenAIStream(ABC):
    """Turns the pieces of a generation into chunks."""

    object: ClassVar[str]

    def __init__(self, generation: Generation, request: SamplingFields) -> None:
        self.generation = generation
        self.tokenizer = generation.state.engine.tokenizer
        self.wants_token_ids = bool(request.return_token_ids)
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        head = {
            "id": generation.request_id,
            "object": self.object,
            "created": generation.created,
            "model": generation.state.engine.model_name,
        }
        self._open = b"data: " + orjson.dumps(head)[:-1]
        self._head = self._open + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"
        self._started: set[int] = set()
        self._num_output_tokens = 0

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        """The chunks of a piece."""
        self._num_output_tokens += len(piece.token_ids)
        if choice.index in self._started:
            return self.chunk(choice, piece, False)
        self._started.add(choice.index)
        return self.chunk(choice, piece, True)

    def last(self) -> bytes:
        """The usage and the receipt, if asked for, and ``[DONE]``."""
        wanted = self._include_usage or self.generation.return_receipt
        return self._usage_chunk() + DONE if wanted else DONE

    def error(self, reply: ErrorReply) -> bytes:
        """Clients raise on the ``error`` key, and stop at ``[DONE]``."""
        return b"data: " + reply.body() + b"\n\n" + DONE

    @abstractmethod
    def chunk(self, choice: Choice, piece: RequestOutput, first: bool) -> bytes:
        """The events for one piece; ``first`` for the first of a choice. Empty when there is nothing to tell."""

    def event(self, index: int, *fields: bytes) -> bytes:
        """One chunk with the choice ``index``; ``fields`` are JSON members, each with its leading comma."""
        return b"".join((self._head, b"%d" % index, *fields, self._tail))

    def token_ids(self, choice: Choice, token_ids: Sequence[int], first: bool) -> bytes:
        """``token_ids``, and with the first piece ``prompt_token_ids``, where they were asked for."""
        if not self.wants_token_ids:
            return b""
        members: dict[str, Any] = {"token_ids": list(token_ids)}
        if first:
            members["prompt_token_ids"] = list(choice.prompt.token_ids)
        return b"," + orjson.dumps(members)[1:-1]

    def _usage_chunk(self) -> bytes:
        generation = self.generation
        counts = usage(generation.num_prompt_tokens, self._num_output_tokens, generation.num_cached_tokens)
        members: dict[str, Any] = {"choices": [], "usage": counts}
        if generation.return_receipt:
            members["receipt"] = generation.receipt()
        return self._open + b"," + orjson.dumps(members)[1:] + b"\n\n"
