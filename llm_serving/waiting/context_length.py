"""Checks whether a request can ever be served, before it enters the queue."""

from __future__ import annotations

from llm_serving.errors import ContextLengthError
from llm_serving.request import Request
from llm_serving.scheduler.limits import SchedulerLimits


def max_output_tokens(request: Request, limits: SchedulerLimits) -> int:
    """Returns the maximum number of output tokens of a request: ``max_tokens``, or fewer if the context has less space
    after the prompt.

    Raises ContextLengthError if the request can never be served. The error text states the limit.
    """
    prompt = len(request.prompt_token_ids)
    if prompt < 1:
        raise ContextLengthError("the prompt has no tokens; it must have at least 1", param="prompt")
    if request.sampling.max_tokens < 1:
        raise ContextLengthError(
            f"max_tokens is {request.sampling.max_tokens}; it must be at least 1", param="max_tokens"
        )
    if prompt > limits.max_prompt_len:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens; the maximum is {limits.max_prompt_len} tokens"
            " (model_config.seq_length). Shorten the prompt.",
            param="prompt",
        )
    if prompt + 1 > limits.max_model_len:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens and the context is {limits.max_model_len} tokens, which leaves no space"
            " for the output. Shorten the prompt.",
            param="prompt",
        )
    max_output = min(request.sampling.max_tokens, limits.max_model_len - prompt)
    _check_cache(prompt, max_output, limits)
    return max_output


def _check_cache(prompt: int, max_output: int, limits: SchedulerLimits) -> None:
    cached = prompt + max_output - 1
    needed, usable = -(-cached // limits.block_size), limits.num_blocks - 1
    if needed > usable:
        raise ContextLengthError(
            f"a prompt of {prompt} tokens and up to {max_output} output tokens need ceil(({prompt} + {max_output}"
            f" - 1) / {limits.block_size}) = {needed} blocks of the KV cache. The KV cache has {usable} blocks"
            f" (pa_config.num_blocks {limits.num_blocks} less the null block) for {usable * limits.block_size} tokens."
            " Shorten the prompt or ask for fewer tokens.",
            param="max_tokens",
        )
