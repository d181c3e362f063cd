"""The response of ``/v1/responses``: a whole response, or the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from llm_serving.request import FinishReason, RequestOutput, TokenLogits
from llm_serving.server.error_replies import ErrorReply
from llm_serving.server.generation.answer_plan import AnswerPlan
from llm_serving.server.generation.piece_reader import PieceReader
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.sequences import Answer, Generation, count_items
from llm_serving.server.generation.work import off_loop
from llm_serving.server.http.json_pieces import encode_in_pieces
from llm_serving.server.responses.conversion import answer_message
from llm_serving.server.responses.fields import ResponsesRequest
from llm_serving.server.responses.input_items import answer_items
from llm_serving.server.responses.items import ItemWriter
from llm_serving.server.responses.logprobs import MessageLogprobs
from llm_serving.server.responses.store import StoredItem, StoredResponse


class Responder:
    """Makes the response of one request, and stores the response unless the client turns this off."""

    def __init__(
        self,
        generation: Generation,
        plan: AnswerPlan | None,
        body: ResponsesRequest,
        messages: Sequence[dict[str, Any]],
        items: Sequence[StoredItem],
        tenant: str,
    ) -> None:
        """``messages`` are the chat messages of the conversation before the answer, without the instructions. ``items``
        is the same conversation as items of ``/v1/responses``.
        """
        self.generation = generation
        self._body, self._messages, self._items, self._tenant = body, messages, items, tenant
        self._reader = PieceReader(plan)
        self._logprobs: MessageLogprobs | None = None
        if body.wants_logprobs:
            [choice], tokenizer = generation.choices, generation.state.engine.tokenizer
            self._logprobs = MessageLogprobs(tokenizer, choice, body.top_logprobs or 0)
        self._writer = ItemWriter(
            generation.request_id, lambda: plan.call_id() if plan is not None else "", self._logprobs
        )

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """Returns the response of a complete answer. If the text is long, another thread parses it."""
        is_cut = answer.finish_reason == FinishReason.LENGTH.value
        events = partial(self.events, answer.text, answer.logits, is_last=True, is_cut=is_cut)
        await off_loop(count_items([answer]), events)
        return self.complete(len(answer.token_ids), is_cut=is_cut)

    def events(self, text: str, logits: Sequence[TokenLogits], *, is_last: bool, is_cut: bool) -> list[dict[str, Any]]:
        """Returns the events of the next piece of text. ``is_cut`` is True if the token limit ended the output.

        ``logits`` has the tokens of the piece, if the client asks for log-probabilities.
        """
        if self._logprobs is not None:
            self._logprobs.add(logits)
        found = self._writer.write(self._reader.events(text, is_last=is_last))
        return found + self._writer.end(is_cut=is_cut) if is_last else found

    def begun(self) -> dict[str, Any]:
        """Returns the response at the start of a stream: without items, with the status ``in_progress``."""
        return self._response("in_progress", [], None)

    def complete(self, num_output_tokens: int, *, is_cut: bool) -> dict[str, Any]:
        """Returns the complete response."""
        response = self._response("incomplete" if is_cut else "completed", self._writer.items, num_output_tokens)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.generation.return_receipt:
            response["receipt"] = self.generation.receipt()
        return response

    def failed(self, reply: ErrorReply) -> dict[str, Any]:
        """Returns the response that ended with an error."""
        response = self._response("failed", self._writer.items, None)
        response["error"] = {"code": reply.code or "server_error", "message": reply.message}
        return response

    def keep(self, response: dict[str, Any]) -> None:
        """Stores a complete response, unless the request has ``"store": false``. Call this method on the event loop.

        If the response is too large, does not store it, and sets its member ``store`` to false.
        """
        if self._body.store is False:
            return
        store, body = self.generation.state.responses, encode_in_pieces(response)
        # Check the size of the response before the conversation is encoded, which takes time.
        if sum(map(len, body)) > store.max_size:
            response["store"] = False
            return
        messages = [*self._messages, answer_message(response["output"])]
        stored = StoredResponse(body, orjson.dumps(messages), self._items, answer_items(response["output"]))
        response["store"] = store.put(self._tenant, self.generation.request_id, stored)

    def _response(self, status: str, output: list[dict[str, Any]], num_output_tokens: int | None) -> dict[str, Any]:
        body, generation = self._body, self.generation
        sampling = generation.choices[0].sampling
        form: dict[str, Any] = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice
        return {
            "id": generation.request_id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": generation.model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": form},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [_tool_json(tool.model_dump()) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if num_output_tokens is None else _usage(generation, num_output_tokens),
        }


class ResponseStream:
    """Formats the events of a streamed response, with their sequence numbers."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._next = 0
        self._num_tokens = 0
        self._is_cut = False

    def events(self, choice: Choice, piece: RequestOutput, /) -> list[bytes]:
        """Returns the events of a piece. The first piece also begins the response."""
        found = []
        if self._next == 0:
            begun = self._responder.begun()
            found = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        self._num_tokens += len(piece.token_ids)
        self._responder.generation.note_tokens(choice.index, piece.token_ids)
        self._is_cut = piece.finish_reason is FinishReason.LENGTH
        is_last = piece.finish_reason is not None
        found += self._responder.events(piece.text, piece.logits, is_last=is_last, is_cut=self._is_cut)
        return self._encoded(found)

    def last(self) -> list[bytes]:
        """Returns the event with the complete response, which is also stored."""
        response = self._responder.complete(self._num_tokens, is_cut=self._is_cut)
        self._responder.keep(response)
        return self._encoded([{"type": f"response.{response['status']}", "response": response}])

    def error(self, reply: ErrorReply, /) -> list[bytes]:
        """Returns the event of an error, which ends the stream. The event contains all items so far, so it can be long.
        """
        return self._encoded([{"type": "response.failed", "response": self._responder.failed(reply)}])

    def _encoded(self, events: Sequence[dict[str, Any]]) -> list[bytes]:
        pieces: list[bytes] = []
        for event in events:
            content = encode_in_pieces(event | {"sequence_number": self._next})
            self._next += 1
            pieces += (b"event: ", str(event["type"]).encode(), b"\ndata: ", *content, b"\n\n")
        return pieces


def _tool_json(tool: dict[str, Any]) -> dict[str, Any]:
    return tool | {"strict": tool["strict"] is not False}


def _usage(generation: Generation, num_output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": generation.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens or 0},
        "total_tokens": generation.num_prompt_tokens + num_output_tokens,
    }
