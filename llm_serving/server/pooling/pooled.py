"""Functions that the endpoints for embeddings, scores and classes share.

They run the sequences, make vectors from the results, and count tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from llm_serving.errors import RequestError
from llm_serving.model.pooling import Pooling
from llm_serving.sampling_params import SamplingParams
from llm_serving.server.generation.prompts import Prompt
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.sequences import Generation
from llm_serving.server.generation.work import check_work
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.state import ServerState

Vector = npt.NDArray[np.float32]

_NO_OUTPUT = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""Sampling parameters of a pooled sequence. The agent returns the pooled result together with one token."""
_SHORTEST = np.float32(1e-12)
"""Minimum Euclidean length by which a vector is divided. It avoids a division by zero. PyTorch uses the same value."""


_RESULTS = {"embed": "embeddings", "score": "scores", "classify": "classes"}
"""Maps a task to the name of its results in error messages."""


def pooling_of(state: ServerState, *tasks: str) -> Pooling:
    """Returns the server's settings for pooled results.

    ``tasks`` are the tasks for which the endpoint exists, for example ``embed``. Raises RequestError if the server was
    started with another task, or generates text.
    """
    pooling = state.settings.pooling
    if pooling is None or pooling.task not in tasks:
        now = "text" if pooling is None else _RESULTS[pooling.task]
        raise RequestError(
            f"This server computes {now}; start it with model_config.task: {tasks[0]} for this endpoint.",
            code="unsupported_task",
        )
    return pooling


async def pooled_results(
    generation: Generation, request: Request, prompts: Sequence[Prompt], param: str
) -> list[Vector]:
    """Returns the pooled result of each prompt, before truncation and normalisation.

    Raises RequestError, which names the field ``param``, if the prompts have too many tokens together. Raises
    LLMServingError if a result cannot be computed.
    """
    state = generation.state
    check_work(state.settings, [(len(prompt.token_ids), 1) for prompt in prompts], 1, name=param)
    name = generation.request_id
    generation.choices = [
        Choice(index, name if len(prompts) == 1 else f"{name}-{index}", prompt, _NO_OUTPUT)
        for index, prompt in enumerate(prompts)
    ]
    state.check_ready()
    answers = await run_while_connected(state.active, request.receive, generation.answers())
    return [np.frombuffer(answer.pooled, np.float32) for answer in answers]


def finished(vector: Vector, dimensions: int | None, *, normalises: bool) -> Vector:
    """Returns the first ``dimensions`` values of ``vector``, or all values if ``dimensions`` is None.

    If ``normalises`` is True, the result is scaled to a Euclidean length of 1.
    """
    kept = vector[:dimensions]
    if not normalises:
        return kept
    unit: Vector = kept / np.maximum(np.sqrt(np.add.reduce(kept * kept)), _SHORTEST)
    return unit


def cosine(first: Vector, second: Vector) -> float:
    """Returns the cosine of the angle between two vectors."""
    one, other = (finished(vector, None, normalises=True) for vector in (first, second))
    return float(np.add.reduce(one * other))


def usage_of(generation: Generation) -> dict[str, Any]:
    """Returns the member ``usage`` of a response without output tokens."""
    tokens = generation.num_prompt_tokens
    details = {"cached_tokens": generation.num_cached_tokens}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}


def receipt_member(generation: Generation) -> dict[str, Any]:
    """Returns the member ``receipt`` of a response, or {} if the request did not ask for it."""
    return {"receipt": generation.receipt()} if generation.return_receipt else {}
