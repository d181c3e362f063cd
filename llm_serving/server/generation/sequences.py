"""Runs the sequences of one HTTP request in the engine: opens them, collects their outputs and closes them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from llm_serving.engine.beam_search import Beam, BeamSearchParams
from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.engine.open_request import OpenRequest, PieceSink
from llm_serving.errors import (
    AgentLostTwiceError,
    DeadlineExceededError,
    LLMServingError,
    NotFiniteError,
    RequestError,
)
from llm_serving.parsing.thinking import ThinkingWatch
from llm_serving.request import FinishReason, ForkableConstraint, RequestOutput, SchedulingParams
from llm_serving.scheduler.output import NOT_FINITE_ERROR
from llm_serving.server.early_refusals.expected import EXPECTED, ExpectedRequest
from llm_serving.server.errors import UnavailableError
from llm_serving.server.generation.answer_plan import AnswerPlan
from llm_serving.server.generation.keep_hint import keep_blocks, keep_seconds_of
from llm_serving.server.generation.open_session import OpenSession
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.scheduling import SchedulingFields, scheduling_of, visit_of
from llm_serving.server.http.protocol import RECEIVED_AT
from llm_serving.server.operations.receipts import receipt_json
from llm_serving.server.state import ServerState
from llm_serving.shadow.scoring import answer_of

OPEN_TOKENS = 32768
"""After passing this number of prompt tokens to the engine, a request lets the event loop run other tasks."""
OPEN_OVERHEAD_TOKENS = 1024
"""Fixed cost of passing a sequence to the engine, as the number of prompt tokens that take the same time."""

POOLED_APIS = ("embeddings", "rerank", "score", "classify")
"""Names of the endpoints whose responses have pooled results instead of text."""
GENERATION = "llm_serving.generation"
"""Key of the ASGI scope for the request's ``Generation``. The application closes it after the response."""


@dataclass(slots=True)
class Answer:
    """The complete output of one choice."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logits: LogitColumns = field(default_factory=LogitColumns)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pooled: bytes = b""
    """The pooled result, for example an embedding, as the bytes of float32 values. Empty for generated text."""


def count_items(answers: Sequence[Answer]) -> int:
    """Returns the number of tokens and log-probabilities that a response with these answers has."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    return tokens + sum(len(answer.logits) * (answer.choice.sampling.top_logits + 1) for answer in answers)


def count_prompt_items(answers: Sequence[Answer]) -> int:
    """Returns the number of prompt tokens of all answers, for a response that repeats the prompt with each answer."""
    return sum(len(answer.choice.prompt.token_ids) for answer in answers)


def _forkable(choice: Choice) -> ForkableConstraint | None:
    """Returns the constraint of a beam search, or None if any text is allowed."""
    constraint = None if choice.grammar is None else choice.grammar.start()
    assert constraint is None or isinstance(constraint, ForkableConstraint), "beams have grammars only"
    return constraint


class Generation:
    """The sequences of one HTTP request. ``open`` passes them to the engine, and ``close`` ends them."""

    def __init__(
        self,
        state: ServerState,
        request: Request,
        api: str,
        id_prefix: str,
        fields: SchedulingFields,
        *,
        stream: bool,
        model: str | None = None,
    ) -> None:
        """``model`` is the request's field ``model``: the name of the served model or of an adapter, or None."""
        if state.settings.pooling is not None and api not in POOLED_APIS:
            raise RequestError(
                "This server computes embeddings, scores or classes and generates no text; start it with "
                "model_config.task: generate for this endpoint.",
                code="unsupported_task",
            )
        self.state = state
        self._visit = visit_of(request)
        self.adapter = state.find_adapter(model, self._visit)
        """The LoRA adapter that the request names, or None."""
        if self._visit is not None:
            self._visit.check_model(self.model_name)
        self.scheduling = scheduling_of(fields, request, state.settings)
        self._keep_s = keep_seconds_of(fields, state.settings)
        self._session = OpenSession.of(state, fields, request)
        if self._session is not None:
            self.scheduling = self._session.with_salt(self.scheduling)
        self.return_receipt = bool(fields.return_receipt)
        self._received_at: float = request.scope[RECEIVED_AT]
        self._expected: ExpectedRequest | None = request.scope.get(EXPECTED)
        self.api = api
        self.request_id = f"{id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.stream = stream
        self.choices: list[Choice] = []
        self.scoring: list[Choice] = []
        """Additional sequences that compute log-probabilities of the prompts. Streamed responses do not have them."""
        self.is_scoring_only = False
        """True if the choices generate no tokens, so that only the sequences of ``scoring`` run."""
        self._open: list[OpenRequest] = []
        self._is_refused = False
        self._cached_tokens: dict[int, int] = {}
        self._searches: list[str] = []
        self._watches: dict[int, ThinkingWatch] = {}
        self.on_close: Callable[[], None] | None = None
        """A function that is called when the generation is closed."""
        request.scope[GENERATION] = self

    @property
    def model_name(self) -> str:
        """The name of the model in the response: the adapter's name, or the name of the served model."""
        return self.state.engine.model_name if self.adapter is None else self.adapter.name

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of the HTTP request. A prompt with several choices counts once."""
        prompts = {id(choice.prompt): len(choice.prompt.token_ids) for choice in self.choices}
        return sum(prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that the first choice of each prompt found in the prefix cache.

        Further choices of a prompt do not count, because they always find the blocks of the first choice.
        """
        first: dict[int, int] = {}
        for choice in self.choices:
            first.setdefault(id(choice.prompt), choice.index)
        return sum(self._cached_tokens.get(index, 0) for index in first.values())

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of tokens of the reasoning until now. None if the model has no reasoning."""
        return sum(watch.num_tokens for watch in self._watches.values()) if self._watches else None

    @property
    def _sequences(self) -> list[Choice]:
        return self.scoring if self.is_scoring_only else [*self.choices, *self.scoring]

    def watch_reasoning(self, plan: AnswerPlan | None) -> None:
        """Counts the reasoning tokens of each choice, if ``plan`` has a format of reasoning."""
        token_bytes = self.state.engine.tokenizer.token_bytes
        for choice in self.choices:
            watch = None if plan is None else plan.watch(token_bytes)
            if watch is not None:
                self._watches[choice.index] = watch

    def note_tokens(self, index: int, token_ids: Sequence[int]) -> None:
        """Counts the next tokens of choice ``index`` if they are part of the reasoning."""
        watch = self._watches.get(index)
        if watch is not None:
            for token_id in token_ids:
                watch.advance(token_id)

    def receipt(self) -> dict[str, Any]:
        """Returns the receipt of the HTTP request: the time that it has spent in each phase until now."""
        now = time.monotonic()
        receipts = [opened.receipt(now) for opened in self._open]
        receipts += filter(None, map(self.state.engine.receipt, self._searches))
        return receipt_json(self.request_id, receipts)

    async def open(self, sink: PieceSink, *, streamed: bool) -> None:
        """Passes all choices to the engine, which passes the pieces of their outputs to ``sink``.

        Other tasks may run before the last choice is open. So pieces of the first choices may arrive during the call.
        If ``streamed`` is True, the caller must call ``delivered`` when it has written a piece. Raises LLMServingError.
        An error that the engine finds after this call is passed to ``sink.fail``.
        """
        if self._visit is not None:
            self._visit.reserve(self.num_prompt_tokens, sum(choice.sampling.max_tokens for choice in self._sequences))
        self._end_expectation()
        num_tokens = 0
        for choice in self._sequences:
            num_tokens += OPEN_OVERHEAD_TOKENS + len(choice.prompt.token_ids)
            if num_tokens > OPEN_TOKENS:
                await asyncio.sleep(0)
                num_tokens = 0
            scheduling = replace(self.scheduling, group=choice.group) if choice.group else self.scheduling
            constraint = None if choice.grammar is None else choice.grammar.start()
            try:
                opened = self.state.engine.open(
                    choice.request_id, choice.prompt.token_ids, choice.sampling, sink, self._received_at,
                    index=choice.index, scheduling=scheduling, streamed=streamed, constraint=constraint,
                    adapter=self.adapter, images=choice.prompt.images,
                )  # fmt: skip
            except RequestError as error:
                self._log_arrival(choice)
                self.note_refusal(error)
                raise
            self._log_arrival(choice)  # logged after ``open``, so that the engine thread can start meanwhile
            self._open.append(opened)

    def delivered(self, index: int, now: float) -> None:
        """Records that a piece of choice ``index`` was written to the client's socket at the time ``now``."""
        self._open[index].delivered(now)

    def close(self, now: float | None = None) -> None:
        """Closes all sequences after the response, and aborts those that have not ended. May be called twice.

        ``now`` is the time when the response was written. The default is the time of the last ``delivered``.
        """
        if self._visit is not None and self._open:
            self._visit.used(self.num_prompt_tokens, sum(opened.num_output_tokens for opened in self._open))
        if self.state.shadow is not None and self._open and self.adapter is None:
            self.state.shadow.offer(self.state.engine, answer_of(self._open[0].request))
        if self._keep_s is not None and self._open:
            keep_blocks(self.state.engine, self.scheduling.tenant, self._open[0].request, self._keep_s)
        if self._session is not None and self._open and not self.is_scoring_only:
            self._session.note(self._open[0].request, self.adapter)
        if self.on_close is not None:
            self.on_close()
            self.on_close = None
        for opened in self._open:
            opened.close(now)
        self._open.clear()  # breaks a reference cycle, which only the garbage collector would free

    async def answers(self, *, keep_logits: bool = False) -> list[Answer]:
        """Returns the complete outputs of all choices, followed by those of the sequences in ``scoring``.

        Raises LLMServingError if an output cannot be completed.
        """
        collector = _Collector(self, keep_logits=keep_logits)
        try:
            if self._sequences:
                await self.open(collector, streamed=False)
                await collector.done
            return collector.answers
        finally:
            del collector  # breaks a reference cycle: an error in the collector refers to this frame

    async def search(self, name: str, choice: Choice, params: BeamSearchParams) -> list[Beam]:
        """Runs a beam search for the choice's prompt. Returns the beams, best first. Raises LLMServingError."""
        num_prompt_tokens = len(choice.prompt.token_ids)
        if self._visit is not None:
            self._visit.reserve(num_prompt_tokens, params.width * params.max_tokens)
        self._end_expectation()
        self._log_arrival(replace(choice, request_id=name))
        self._searches.append(name)
        prompt = choice.prompt.token_ids
        # If the search is aborted, its number of tokens is unknown. Then the maximum counts against the key's quota.
        num_output_tokens = params.width * params.max_tokens
        try:
            result = await self.state.engine.search(
                name, prompt, params, self._received_at, scheduling=self.scheduling, adapter=self.adapter,
                constraint=_forkable(choice),
            )  # fmt: skip
            num_output_tokens = sum(len(beam.token_ids) for beam in result.beams)
        except RequestError as error:
            num_output_tokens = 0
            self.note_refusal(error)
            raise
        finally:
            if self._visit is not None:
                self._visit.used(num_prompt_tokens, num_output_tokens)
        self._cached_tokens[choice.index] = result.num_cached_tokens
        return result.beams

    def note_end(self, index: int, piece: RequestOutput) -> LLMServingError | None:
        """Records the last piece of choice ``index``. Returns an error for the client if the output is not complete."""
        self._cached_tokens[index] = piece.num_cached_tokens
        if piece.finish_reason is FinishReason.ERROR:
            if piece.error == NOT_FINITE_ERROR:
                return NotFiniteError(piece.error)
            return AgentLostTwiceError.or_failure(piece.error)
        if piece.finish_reason is not FinishReason.ABORT:
            return None
        if piece.error is not None:
            return DeadlineExceededError(piece.error, param="deadline_ms")
        return UnavailableError("The request was aborted by the server.", "aborted")

    @property
    def is_refused(self) -> bool:
        """Whether the engine refused a choice, and the log has this refusal."""
        return self._is_refused

    def note_refusal(self, error: Exception) -> None:
        """Logs that the engine refused a choice. For each request, only the first refusal is logged."""
        if self._is_refused or not isinstance(error, RequestError):
            return
        self._is_refused = True
        self.state.log.event("request_refused", request_id=self.request_id, code=error.code, message=str(error))

    def _end_expectation(self) -> None:
        """Counts the HTTP request no longer as expected. Call this method just before the engine knows the request, so
        that it does not count twice.
        """
        if self._expected is not None:
            self._expected.end()

    def _log_arrival(self, choice: Choice) -> None:
        fields: dict[str, Any] = {
            "request_id": choice.request_id,
            "api": self.api,
            "prompt_tokens": len(choice.prompt.token_ids),
            "max_tokens": choice.sampling.max_tokens,
            "stream": self.stream,
        }
        if self.adapter is not None:
            fields["adapter"] = self.adapter.name
        fields.update(_scheduling_fields(self.scheduling))
        if self.state.settings.log_prompts:
            fields["prompt"] = choice.prompt.as_text(self.state.engine.tokenizer)
        self.state.log.event("request_arrival", **fields)


class _Collector:
    """A ``PieceSink`` that collects the complete outputs of all choices, for a response without streaming."""

    def __init__(self, generation: Generation, *, keep_logits: bool) -> None:
        sequences = [*generation.choices, *generation.scoring]
        self.answers = [Answer(choice) for choice in sequences]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._generation = generation
        self._keep_logits = keep_logits
        self._texts: list[list[str]] = [[] for _ in sequences]
        self._num_open = len(generation._sequences)

    def push(self, index: int, piece: RequestOutput) -> None:
        if self.done.done():
            return
        answer = self.answers[index]
        self._texts[index].append(piece.text)
        self._generation.note_tokens(index, piece.token_ids)
        answer.token_ids.extend(piece.token_ids)
        if self._keep_logits:
            answer.logits.extend(piece.logits)
        if piece.finish_reason is None:
            return
        if (error := self._generation.note_end(index, piece)) is not None:
            self.done.set_exception(error)
            return
        answer.text = "".join(self._texts[index])
        answer.finish_reason = piece.finish_reason.value
        answer.stop_reason = piece.stop_reason
        answer.pooled = piece.pooled
        self._num_open -= 1
        if self._num_open == 0:
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        self._generation.note_refusal(error)
        if not self.done.done():
            self.done.set_exception(error)


def _scheduling_fields(scheduling: SchedulingParams) -> dict[str, Any]:
    """Returns the scheduling parameters that differ from their defaults, as fields of a log event."""
    values = {
        "tenant": scheduling.tenant or None,
        "priority": scheduling.priority or None,
        "ttft_objective_ms": _milliseconds(scheduling.ttft_objective),
        "tbt_objective_ms": _milliseconds(scheduling.tbt_objective),
        "deadline_ms": _milliseconds(scheduling.deadline),
    }
    return {name: value for name, value in values.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)
