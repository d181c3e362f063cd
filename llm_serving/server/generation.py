"""Answers to prompts: one engine request for each, merged into one stream or collected."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from llm_serving.errors import RequestError
from llm_serving.request import FinishReason, RequestOutput, SamplingParams, TokenLogits
from llm_serving.server.errors import EngineFailedError, UnavailableError
from llm_serving.server.http_protocol import RECEIVED_AT
from llm_serving.server.limits import MAX_SEQUENCES
from llm_serving.server.prompts import Prompt
from llm_serving.server.sampling import request_seed, with_choice
from llm_serving.server.state import ServerState

__all__ = ["Answer", "Choice", "Generation", "check_choices", "make_choices"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to be generated, an engine request of its own; ``index`` is its place in the response."""

    index: int
    request_id: str
    prompt: Prompt
    sampling: SamplingParams


@dataclass(slots=True)
class Answer:
    """One finished answer."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logits: list[TokenLogits] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def check_choices(num_prompts: int, n: int) -> None:
    """Raises RequestError when one request would make too many sequences."""
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts with n = {n} make {num_prompts * n} sequences; one request may make at most "
            f"{MAX_SEQUENCES}.",
            param="n",
            code="invalid_value",
        )


def make_choices(
    request_id: str, prompts: Sequence[Prompt], sampling: Sequence[tuple[SamplingParams, int]], n: int, seed: int | None
) -> list[Choice]:
    """``n`` sequences for each prompt, prompt by prompt. ``sampling`` has the parameters and room of each prompt.

    The seed of an answer depends on the request's seed and its number among the ``n``, not on the other prompts.
    """
    choices: list[Choice] = []
    for prompt, (params, max_tokens) in zip(prompts, sampling, strict=True):
        prompt_seed = request_seed(seed)
        for i in range(n):
            index = len(choices)
            name = request_id if len(prompts) * n == 1 else f"{request_id}-{index}"
            choices.append(Choice(index, name, prompt, with_choice(params, max_tokens, prompt_seed, i)))
    return choices


class Generation:
    """The sequences of one HTTP request."""

    def __init__(self, state: ServerState, request: Request, api: str, id_prefix: str, *, stream: bool) -> None:
        self.state = state
        self._received_at: float = request.scope[RECEIVED_AT]
        self.api = api
        self.request_id = f"{id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.stream = stream
        self.choices: list[Choice] = []

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once however many answers it gets."""
        prompts = {id(choice.prompt): len(choice.prompt.token_ids) for choice in self.choices}
        return sum(prompts.values())

    async def pieces(self) -> AsyncGenerator[tuple[Choice, RequestOutput], None]:
        """The pieces of all sequences as they come. Closing it aborts what has not ended.

        Raises LLMServingError, before the first piece if the engine refuses a choice.
        """
        for choice in self.choices:
            self._log_arrival(choice)
        try:
            async with aclosing(self._single() if len(self.choices) == 1 else self._merged()) as pieces:
                async for choice, piece in pieces:
                    if piece.finish_reason is FinishReason.ERROR:
                        raise EngineFailedError(piece.error or "The engine could not finish the request.")
                    if piece.finish_reason is FinishReason.ABORT:
                        raise UnavailableError(piece.error or "The request was aborted by the server.", "aborted")
                    yield choice, piece
        except RequestError as error:
            self.state.log.event("request_refused", request_id=self.request_id, code=error.code, message=str(error))
            raise

    async def answers(self, *, keep_logits: bool = False) -> list[Answer]:
        """All answers, complete."""
        answers = [Answer(choice) for choice in self.choices]
        texts: list[list[str]] = [[] for _ in answers]
        async with aclosing(self.pieces()) as pieces:
            async for choice, piece in pieces:
                answer = answers[choice.index]
                texts[choice.index].append(piece.text)
                answer.token_ids.extend(piece.token_ids)
                if keep_logits:
                    answer.logits.extend(piece.logits)
                if piece.finish_reason is not None:
                    answer.finish_reason = piece.finish_reason.value
                    answer.stop_reason = piece.stop_reason
        for answer, parts in zip(answers, texts, strict=True):
            answer.text = "".join(parts)
        return answers

    def _generate(self, choice: Choice) -> AsyncGenerator[RequestOutput, None]:
        return self.state.engine.generate(
            choice.request_id, choice.prompt.token_ids, choice.sampling, self._received_at
        )

    async def _single(self) -> AsyncGenerator[tuple[Choice, RequestOutput], None]:
        choice = self.choices[0]
        async with aclosing(self._generate(choice)) as pieces:
            async for piece in pieces:
                yield choice, piece

    async def _merged(self) -> AsyncGenerator[tuple[Choice, RequestOutput], None]:
        """All streams in one. The queue is short: when the client is slow, the engine merges pieces."""
        queue: asyncio.Queue[tuple[Choice, RequestOutput | Exception | None]] = asyncio.Queue(len(self.choices))

        async def pump(choice: Choice) -> None:
            try:
                async with aclosing(self._generate(choice)) as pieces:
                    async for piece in pieces:
                        await queue.put((choice, piece))
            except Exception as error:  # handed to the reader, who raises it
                await queue.put((choice, error))
            else:
                await queue.put((choice, None))

        tasks = [asyncio.ensure_future(pump(choice)) for choice in self.choices]
        try:
            running = len(tasks)
            while running:
                choice, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield choice, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _log_arrival(self, choice: Choice) -> None:
        fields: dict[str, Any] = {
            "request_id": choice.request_id,
            "api": self.api,
            "prompt_tokens": len(choice.prompt.token_ids),
            "max_tokens": choice.sampling.max_tokens,
            "stream": self.stream,
        }
        if self.state.settings.log_prompts:
            fields["prompt"] = choice.prompt.as_text(self.state.engine.tokenizer)
        self.state.log.event("request_arrival", **fields)
