"""Lets an engine score an answer, with the lowest priority."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.constraints.forced import ForcedTokens
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.open_request import PieceStream
from llm_serving.errors import EngineFailedError, RequestError
from llm_serving.request import FinishReason, Request, SchedulingParams, TokenLogits
from llm_serving.sampling_params import SamplingParams
from llm_serving.shadow.comparison import ScoredAnswer

LOWEST_PRIORITY = 2**31 - 1
"""Priority of the requests that score an answer: all other requests come first."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer that the main model gave to a user."""

    prompt: Sequence[int]
    output: Sequence[int]
    salt: bytes
    """The salt of the user's request for the prefix cache."""
    has_images: bool = False
    """True if the prompt has images. Then the answer cannot be scored, because the server does not keep the pixels."""


def answer_of(request: Request) -> ServedAnswer:
    """Returns the answer to a request. The output is empty if the request was aborted, failed or has images."""
    is_whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    output = request.output_token_ids if is_whole and not request.tiles else ()
    return ServedAnswer(request.prompt_token_ids, output, request.cache_salt, bool(request.tiles))


async def score(engine: AsyncEngine, answer: ServedAnswer) -> ScoredAnswer:
    """Returns the score of an answer. Cancel the call to abort it.

    Raises RequestError if the prompt has images, or if the engine refuses it, for example because it is too long.
    Raises EngineFailedError if the engine did not score the whole answer.
    """
    if answer.has_images:
        # The request's salt includes a digest of its images. Scoring without the images would put wrong blocks into the
        # prefix cache under this salt.
        raise RequestError("a prompt with images cannot be scored without its images")
    sampling = SamplingParams(
        max_tokens=len(answer.output), temperature=0.0, ignore_eos=True, logprobs=True, top_logits=1
    )
    stream, logits = PieceStream(), list[TokenLogits]()
    opened = engine.open(
        f"shadow-{uuid.uuid4().hex}", answer.prompt, sampling, stream,
        scheduling=SchedulingParams(priority=LOWEST_PRIORITY, cache_salt=answer.salt), streamed=False, quiet=True,
        constraint=ForcedTokens(answer.output, engine.config.shape.vocab_size),
    )  # fmt: skip
    try:
        while True:
            piece = await stream.next()
            logits += piece.logits
            if piece.finished:
                break
    finally:
        opened.close()
    if piece.finish_reason is not FinishReason.LENGTH or piece.timings is None or len(logits) != len(answer.output):
        raise EngineFailedError(piece.error or "the engine did not score the whole answer")
    return ScoredAnswer(logits, piece.timings.prefill + piece.timings.decode)
