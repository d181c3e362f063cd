"""Answers to prompts: one engine request for each, handed on piece by piece or collected."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from llm_serving.engine.beam_search import Beam, BeamSearchParams
from llm_serving.errors import DeadlineExceededError, EngineFailedError, LLMServingError, RequestError
from llm_serving.request import FinishReason, RequestOutput, SchedulingParams
from llm_serving.server.choices import Answer, Choice
from llm_serving.server.errors import UnavailableError
from llm_serving.server.http_protocol import RECEIVED_AT
from llm_serving.server.protocol import SchedulingFields
from llm_serving.server.receipts import receipt_json
from llm_serving.server.scheduling import scheduling_of
from llm_serving.server.state import ServerState

if TYPE_CHECKING:
    from llm_serving.server.engine_api import OpenRequest

__all__ = ["GENERATION", "Generation", "PieceTaker"]

GENERATION = "llm_serving.generation"
"""Key of the ASGI scope: the ``Generation`` that answers the request, to be closed when the response has been sent."""


class PieceTaker(Protocol):
    """Takes the pieces of all choices of a generation, on the event loop."""

    def take(self, choice: Choice, piece: RequestOutput, /) -> None:
        """The next piece of a choice; the last one is ``finished``, by ``STOP`` or ``LENGTH``."""

    def fail(self, error: Exception, /) -> None:
        """The generation cannot go on; nothing more comes."""


class _ChoiceSink:
    """Where the engine puts one choice's pieces. What a taker raises ends its generation, and no other."""

    __slots__ = ("_choice", "_generation", "_taker")

    def __init__(self, generation: Generation, choice: Choice, taker: PieceTaker) -> None:
        self._generation = generation
        self._choice = choice
        self._taker = taker

    def push(self, piece: RequestOutput) -> None:
        failure = _failure(piece)
        if failure is not None:
            self._taker.fail(failure)
            return
        try:
            if piece.finish_reason is not None:
                self._generation.note_end(self._choice, piece)
            self._taker.take(self._choice, piece)
        except Exception as error:
            self._taker.fail(error)

    def fail(self, error: LLMServingError) -> None:
        if isinstance(error, RequestError):
            self._generation.note_refusal(error)
        self._taker.fail(error)


def _failure(piece: RequestOutput) -> LLMServingError | None:
    """What a client is told whose answer ends with ``piece``, unless it is complete."""
    if piece.finish_reason is FinishReason.ERROR:
        return EngineFailedError(piece.error or "The engine could not finish the request.")
    if piece.finish_reason is not FinishReason.ABORT:
        return None
    if piece.error is not None:
        return DeadlineExceededError(piece.error, param="deadline_ms")
    return UnavailableError("The request was aborted by the server.", "aborted")


class _Collector:
    """Takes whole answers."""

    def __init__(self, choices: Sequence[Choice], *, keep_logits: bool) -> None:
        self.answers = [Answer(choice) for choice in choices]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keep_logits = keep_logits
        self._texts: list[list[str]] = [[] for _ in choices]
        self._num_open = len(self.answers)

    def take(self, choice: Choice, piece: RequestOutput) -> None:
        answer = self.answers[choice.index]
        self._texts[choice.index].append(piece.text)
        answer.token_ids.extend(piece.token_ids)
        if self._keep_logits:
            answer.logits.extend(piece.logits)
        if piece.finish_reason is None:
            return
        answer.text = "".join(self._texts[choice.index])
        answer.finish_reason = piece.finish_reason.value
        answer.stop_reason = piece.stop_reason
        self._num_open -= 1
        if self._num_open == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Generation:
    """The sequences of one HTTP request, from ``open`` to ``close``: whoever sends the response calls both."""

    def __init__(
        self, state: ServerState, request: Request, api: str, id_prefix: str, fields: SchedulingFields, *, stream: bool
    ) -> None:
        self.state = state
        self.scheduling = scheduling_of(fields, request.headers, state.settings)
        self.return_receipt = bool(fields.return_receipt)
        self._received_at: float = request.scope[RECEIVED_AT]
        self.api = api
        self.request_id = f"{id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.stream = stream
        self.choices: list[Choice] = []
        self._open: list[OpenRequest] = []
        self._is_refused = False
        self._cached_tokens: dict[int, int] = {}
        self._searches: list[str] = []
        request.scope[GENERATION] = self

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once however many answers it gets."""
        prompts = {id(choice.prompt): len(choice.prompt.token_ids) for choice in self.choices}
        return sum(prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were found in the prefix cache, for the first answer to each prompt: the others
        always find what that one has left."""
        first: dict[int, int] = {}
        for choice in self.choices:
            first.setdefault(id(choice.prompt), choice.index)
        return sum(self._cached_tokens.get(index, 0) for index in first.values())

    def receipt(self) -> dict[str, Any]:
        """Where the time went until now."""
        now = time.monotonic()
        receipts = [opened.receipt(now) for opened in self._open]
        receipts += filter(None, map(self.state.engine.receipt, self._searches))
        return receipt_json(self.request_id, receipts)

    def open(self, taker: PieceTaker, *, streamed: bool) -> None:
        """Hand all choices to the engine. Raises LLMServingError, as ``taker.fail`` may be told later.

        ``streamed``: the caller will say when output was ``delivered``.
        """
        for choice in self.choices:
            sink = _ChoiceSink(self, choice, taker)
            scheduling = replace(self.scheduling, group=choice.group) if choice.group else self.scheduling
            try:
                opened = self.state.engine.open(
                    choice.request_id, choice.prompt.token_ids, choice.sampling, sink, self._received_at,
                    scheduling=scheduling, streamed=streamed,
                )  # fmt: skip
            except RequestError as error:
                self._log_arrival(choice)
                self.note_refusal(error)
                raise
            self._log_arrival(choice)  # while the engine is at work
            self._open.append(opened)

    def delivered(self, index: int, now: float) -> None:
        """Output of choice ``index`` had been written to the client's socket by ``now``."""
        self._open[index].delivered(now)

    def close(self, now: float | None = None) -> None:
        """The response is over, written by ``now`` (by default with the last ``delivered``); what has not ended is
        aborted, and nothing more is known of any. May be called twice."""
        for opened in self._open:
            opened.close(now)
        self._open.clear()  # each holds its sink, and that us: as a cycle, all would wait for the collector

    async def answers(self, *, keep_logits: bool = False) -> list[Answer]:
        """All answers, complete. Raises LLMServingError when there is one that cannot be completed."""
        collector = _Collector(self.choices, keep_logits=keep_logits)
        self.open(collector, streamed=False)
        try:
            await collector.done
            return collector.answers
        finally:
            del collector  # an error in it holds this frame, see ``close``

    def note_end(self, choice: Choice, piece: RequestOutput) -> None:
        """The last piece of a choice has come."""
        self._cached_tokens[choice.index] = piece.num_cached_tokens

    async def search(self, name: str, choice: Choice, params: BeamSearchParams) -> list[Beam]:
        """The likeliest answers to the prompt of ``choice``. Raises LLMServingError."""
        self._log_arrival(replace(choice, request_id=name))
        self._searches.append(name)
        prompt = choice.prompt.token_ids
        try:
            result = await self.state.engine.search(name, prompt, params, self._received_at, scheduling=self.scheduling)
        except RequestError as error:
            self.note_refusal(error)
            raise
        self._cached_tokens[choice.index] = result.num_cached_tokens
        return result.beams

    def note_refusal(self, error: RequestError) -> None:
        """Into the log, once: all choices are refused alike."""
        if self._is_refused:
            return
        self._is_refused = True
        self.state.log.event("request_refused", request_id=self.request_id, code=error.code, message=str(error))

    def _log_arrival(self, choice: Choice) -> None:
        fields: dict[str, Any] = {
            "request_id": choice.request_id,
            "api": self.api,
            "prompt_tokens": len(choice.prompt.token_ids),
            "max_tokens": choice.sampling.max_tokens,
            "stream": self.stream,
        }
        fields.update(_terms(self.scheduling))
        if self.state.settings.log_prompts:
            fields["prompt"] = choice.prompt.as_text(self.state.engine.tokenizer)
        self.state.log.event("request_arrival", **fields)


def _terms(scheduling: SchedulingParams) -> dict[str, Any]:
    """What the log says of a request's terms, as far as they are not the usual ones."""
    terms = {
        "tenant": scheduling.tenant or None,
        "priority": scheduling.priority or None,
        "ttft_objective_ms": _milliseconds(scheduling.ttft_objective),
        "tbt_objective_ms": _milliseconds(scheduling.tbt_objective),
        "deadline_ms": _milliseconds(scheduling.deadline),
    }
    return {name: value for name, value in terms.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)
