"""The sequences that one HTTP request asks for, and what they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_serving.errors import RequestError
from llm_serving.request import SamplingParams, TokenLogits
from llm_serving.server.limits import MAX_SEQUENCES
from llm_serving.server.prompts import Prompt
from llm_serving.server.sampling import request_seed, with_choice

__all__ = ["Answer", "Choice", "check_choices", "make_choices"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to be generated, an engine request of its own; ``index`` is its place in the response."""

    index: int
    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    group: str = ""
    """Of the answers to one prompt, where there are several: they share the prompt's blocks."""


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
            group = f"{request_id}/{index - i}" if n > 1 else ""
            choices.append(Choice(index, name, prompt, with_choice(params, max_tokens, prompt_seed, i), group))
    return choices
