"""From a request's fields to ``SamplingParams``: defaults, room in the context, seeds."""

from __future__ import annotations

import secrets
from dataclasses import replace

from llm_serving.errors import ContextLengthError
from llm_serving.request import MAX_TOP_LOGITS, SamplingParams
from llm_serving.server.protocol import SamplingFields
from llm_serving.server.protocol_dialects import DialectSampling
from llm_serving.server.state import ServerSettings

__all__ = [
    "GREEDY_BELOW",
    "base_sampling",
    "check_prompt",
    "choice_seed",
    "dialect_sampling",
    "output_room",
    "request_seed",
    "with_choice",
]

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing logits by it leaves nothing of the others, or overflows."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def base_sampling(fields: SamplingFields) -> SamplingParams:
    """What the fields say, without ``max_tokens``, seed and log-probabilities."""
    return SamplingParams(
        temperature=temperature_of(fields.temperature),
        top_k=max(fields.top_k or 0, 0),
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        stop=fields.stop,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def dialect_sampling(fields: DialectSampling, top_logits: int = 0, *, logprobs: bool = False) -> SamplingParams:
    """As ``base_sampling``, for the published dialects: greedy unless asked to sample, or given something to sample by.

    ``top_logits`` is raised to the most there are where ``return_logits`` asks for them.
    """
    given = (fields.temperature, fields.top_k, fields.top_p)
    sample = any(value is not None for value in given) if fields.do_sample is None else fields.do_sample
    return SamplingParams(
        temperature=temperature_of(fields.temperature) if sample else 0.0,
        top_k=max(fields.top_k or 0, 0) if sample else 0,
        top_p=fields.top_p if sample and fields.top_p is not None else 1.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        frequency_penalty=fields.frequency_penalty or 0.0,
        stop=fields.stop,
        logprobs=logprobs,
        top_logits=MAX_TOP_LOGITS if fields.return_logits else top_logits,
    )


def temperature_of(value: float | None) -> float:
    """OpenAI's default is 1; next to nothing is greedy."""
    if value is None:
        return 1.0
    return 0.0 if value < GREEDY_BELOW else value


def with_choice(sampling: SamplingParams, max_tokens: int, seed: int, index: int) -> SamplingParams:
    """The parameters of answer ``index`` to a prompt."""
    return replace(sampling, max_tokens=max_tokens, seed=choice_seed(seed, index))


def choice_seed(seed: int, index: int) -> int:
    """Seed of answer ``index`` (of ``n``) to a prompt: the first uses the request's seed itself.

    The others use SplitMix64 (Steele, Lea and Flood 2014), so that neighbouring seeds share no answer.
    """
    if index == 0:
        return seed & _MASK
    z = (seed + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def request_seed(seed: int | None) -> int:
    """The seed asked for, or a random one of 64 bits."""
    return secrets.randbits(64) if seed is None else seed & _MASK


def check_prompt(num_tokens: int, settings: ServerSettings, param: str) -> None:
    """Raises ContextLengthError when a prompt of so many tokens leaves no room for an answer."""
    if num_tokens > settings.max_prompt_tokens:
        raise ContextLengthError(
            f"The prompt has {num_tokens} tokens; the longest this server takes is {settings.max_prompt_tokens} "
            "(model_config.seq_length). Shorten it.",
            param=param,
        )
    if num_tokens >= settings.max_context:
        raise ContextLengthError(
            f"This model's maximum context length is {settings.max_context} tokens, and the prompt has {num_tokens}, "
            "which leaves no room for an answer. Shorten it.",
            param=param,
        )


def output_room(num_tokens: int, max_tokens: int | None, settings: ServerSettings, param: str) -> int:
    """The most tokens to generate after a prompt of ``num_tokens``: ``max_tokens``, or all there is room for.

    Raises ContextLengthError when ``max_tokens`` does not fit.
    """
    room = settings.max_context - num_tokens
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextLengthError(
            f"This model's maximum context length is {settings.max_context} tokens. However, you requested "
            f"{num_tokens + max_tokens} tokens ({num_tokens} in the prompt, {max_tokens} in the answer). Shorten the "
            f"prompt or lower {param}.",
            param=param,
        )
    return max_tokens
