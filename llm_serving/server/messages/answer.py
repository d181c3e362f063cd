"""The response of ``/v1/messages``: a whole message, or the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from llm_serving.request import FinishReason, RequestOutput
from llm_serving.server.error_replies import ErrorReply
from llm_serving.server.generation.answer_plan import AnswerPlan
from llm_serving.server.generation.piece_reader import PieceReader
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.sequences import Answer, Generation
from llm_serving.server.messages.blocks import BlockWriter, blocks_of


def call_id(plan: AnswerPlan | None) -> str:
    """Returns a new id for a tool call. It begins with ``toolu_``, unless the model needs ids of a fixed length."""
    assert plan is not None, "only a plan with tools has calls"
    made = plan.call_id()
    return f"toolu_{made.removeprefix('call_')}" if made.startswith("call_") else made


def message_of(
    generation: Generation, plan: AnswerPlan | None, answer: Answer, max_tokens: int, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the message of a complete answer. Any thread may call this function.

    ``max_tokens`` is that of the request. ``more`` has further members of the message.
    """
    reader = PieceReader(plan)
    events = reader.events(answer.text, is_last=True)
    message = _head(generation)
    message["content"] = blocks_of(events, lambda: call_id(plan))
    message |= _stop(answer.choice, max_tokens, answer.finish_reason, answer.stop_reason, has_calls=reader.has_calls)
    message["usage"] = _usage(generation, len(answer.token_ids), generation.num_cached_tokens)
    return message | dict(more)


class MessageStream:
    """Formats the events of a streamed message. ``max_tokens`` is that of the request."""

    def __init__(self, generation: Generation, plan: AnswerPlan | None, max_tokens: int) -> None:
        self._generation = generation
        self._max_tokens = max_tokens
        self._reader = PieceReader(plan)
        self._writer = BlockWriter(lambda: call_id(plan))
        self._num_tokens = 0
        self._has_begun = False
        self._end: dict[str, Any] = {}

    def events(self, choice: Choice, piece: RequestOutput, /) -> bytes:
        """Returns the events of a piece. The first piece also begins the message."""
        found: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            message = _head(self._generation) | {"content": [], "stop_reason": None, "stop_sequence": None}
            message["usage"] = _usage(self._generation, 0, 0)
            found += [{"type": "message_start", "message": message}, {"type": "ping"}]
        self._num_tokens += len(piece.token_ids)
        self._generation.note_tokens(choice.index, piece.token_ids)
        is_last = piece.finish_reason is not None
        found += self._writer.write(self._reader.events(piece.text, is_last=is_last))
        if piece.finish_reason is not None:
            found += self._writer.end()
            reason, has_calls = piece.finish_reason.value, self._reader.has_calls
            self._end = _stop(choice, self._max_tokens, reason, piece.stop_reason, has_calls=has_calls)
        return b"".join(map(_encoded, found))

    def last(self) -> bytes:
        """Returns the end of the message: stop reason and usage."""
        usage = _usage(self._generation, self._num_tokens, self._generation.num_cached_tokens)
        event: dict[str, Any] = {"type": "message_delta", "delta": self._end, "usage": usage}
        if self._generation.return_receipt:
            event["receipt"] = self._generation.receipt()
        return _encoded(event) + _encoded({"type": "message_stop"})

    def error(self, reply: ErrorReply, /) -> bytes:
        """Returns an error as the end of the stream."""
        return b"event: error\ndata: " + reply.body() + b"\n\n"


def _encoded(event: dict[str, Any]) -> bytes:
    return b"".join((b"event: ", str(event["type"]).encode(), b"\ndata: ", orjson.dumps(event), b"\n\n"))


def _head(generation: Generation) -> dict[str, Any]:
    model = generation.model_name
    return {"id": generation.request_id, "type": "message", "role": "assistant", "model": model}


def _stop(
    choice: Choice, max_tokens: int, finish_reason: str | None, stop_reason: str | int | None, *, has_calls: bool
) -> dict[str, Any]:
    """Returns the members ``stop_reason`` and ``stop_sequence``, which state why the message ended.

    If the context was full before ``max_tokens`` were generated, the reason is ``model_context_window_exceeded``, as
    for Anthropic's newer models.
    """
    if finish_reason == FinishReason.LENGTH.value:
        is_full = choice.sampling.max_tokens < max_tokens
        return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def _usage(generation: Generation, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Returns the token counts. ``input_tokens`` leaves out the tokens that were found in the prefix cache."""
    usage: dict[str, Any] = {
        "input_tokens": generation.num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }
    if (num_reasoning_tokens := generation.num_reasoning_tokens) is not None:
        usage["output_tokens_details"] = {"thinking_tokens": num_reasoning_tokens}
    return usage
