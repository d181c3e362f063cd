"""Turns the fields of a request into choices: the sequences to generate, with sampling parameters and seeds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llm_serving.request import Constraint
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS, SamplingParams
from llm_serving.server.fields.shared import DialectSampling, SamplingFields
from llm_serving.server.generation.prompts import Prompt
from llm_serving.server.generation.work import check_work
from llm_serving.server.state import ServerSettings

GREEDY_BELOW = 1e-5
"""A temperature below this value means greedy sampling, because logits divided by it could overflow."""

_NAMES = tuple(each.name for each in SAMPLER_PARAMETERS if each.name != "seed")
_MASK = 2**64 - 1
"""Keeps the lowest 64 bits of a seed."""
_GOLDEN = 0x9E3779B97F4A7C15


class ConstraintSource(Protocol):
    """Makes the constraint of each choice, for example a compiled grammar."""

    def start(self) -> Constraint:
        """Returns the constraint of a sequence without output."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of an HTTP request.

    ``request_id`` is the id of the sequence in the engine. ``index`` is its position in the response.
    """

    index: int
    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    group: str = ""
    """Name of the request group: all choices of one prompt have the same name, and share the prompt's blocks. Empty if
    the prompt has only one choice."""
    grammar: ConstraintSource | None = None
    """Constrains the text. None if any text is allowed."""


def base_sampling(fields: SamplingFields, defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters of an OpenAI request. ``max_tokens``, seed and log-probabilities are set later.

    ``defaults`` are the values that the model recommends. They apply to parameters that the request does not set. A
    beam search does not use them.
    """
    values = _sampler_values(fields)
    return SamplingParams(
        **(values if fields.use_beam_search else {**_usable(defaults), **values}),
        stop=fields.stop,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        logit_bias=fields.logit_bias,
        min_tokens=fields.min_tokens or 0,
        allowed_token_ids=frozenset(fields.allowed_token_ids or ()),
        bad_words=fields.bad_words,
        ignore_eos=bool(fields.ignore_eos),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def dialect_sampling(fields: DialectSampling, top_logits: int = 0, *, logprobs: bool = False) -> SamplingParams:
    """Returns the sampling parameters of ``/generate`` and ``/chat``. ``max_tokens`` and the seed are set later.

    If the request does not set ``do_sample``, setting ``temperature``, ``top_k`` or ``top_p`` turns sampling on.
    ``top_logits`` is the number of best tokens for which the response has logits. If the request has
    ``return_logits``, the maximum is used instead.
    """
    given = (fields.temperature, fields.top_k, fields.top_p)
    sample = any(value is not None for value in given) if fields.do_sample is None else fields.do_sample
    values = _sampler_values(fields)
    if not sample:
        values |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    return SamplingParams(
        **values,
        stop=fields.stop,
        logprobs=logprobs,
        top_logits=MAX_TOP_LOGITS if fields.return_logits else top_logits,
    )


def _sampler_values(fields: SamplingFields | DialectSampling) -> dict[str, Any]:
    """Returns the sampling parameters that the client has set, without the seed, which ``make_choices`` sets."""
    return _usable({name: value for name in _NAMES if (value := getattr(fields, name, None)) is not None})


def _usable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``given`` with ``temperature`` and ``top_k`` in the form that the sampler needs.

    A temperature near 0 becomes 0, which means greedy sampling. ``top_k`` -1 becomes 0, which means no limit.
    """
    values = dict(given)
    if "temperature" in values and values["temperature"] < GREEDY_BELOW:
        values["temperature"] = 0.0
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)
    return values


def make_choices(
    settings: ServerSettings,
    request_id: str,
    prompts: Sequence[Prompt],
    sampling: Sequence[tuple[SamplingParams, int]],
    n: int,
    seed: int | None,
    grammar: ConstraintSource | None = None,
) -> list[Choice]:
    """Makes ``n`` choices for each prompt. ``sampling`` has the parameters and ``max_tokens`` of each prompt.

    ``grammar`` constrains the text of all choices. Raises RequestError if the request could need more work than the
    server's limits allow.

    The seed of a choice is computed from the request's seed and the number of the choice within its prompt. The seed
    does not depend on other prompts of the request.
    """
    lengths = [(prompt.work(), most) for prompt, (_, most) in zip(prompts, sampling, strict=True)]
    check_work(settings, lengths, n, max(_entries_per_token(params) for params, _ in sampling))
    choices: list[Choice] = []
    for prompt, (params, max_tokens) in zip(prompts, sampling, strict=True):
        prompt_seed = secrets.randbits(64) if seed is None else seed & _MASK
        for i in range(n):
            index = len(choices)
            name = request_id if len(prompts) * n == 1 else f"{request_id}-{index}"
            group = f"{request_id}/{index - i}" if n > 1 else ""
            its_params = replace(params, max_tokens=max_tokens, seed=choice_seed(prompt_seed, i))
            choices.append(Choice(index, name, prompt, its_params, group, grammar))
    return choices


def _entries_per_token(params: SamplingParams) -> int:
    """Returns the number of log-probabilities for each output token: the best tokens and the token itself."""
    return params.top_logits + 1 if params.wants_logits else 0


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of choice ``index`` of a prompt. The first choice uses the request's own seed.

    The seeds of the other choices come from SplitMix64 (Steele, Lea and Flood 2014). So the choices of requests with
    neighbouring seeds do not get the same seeds.
    """
    if index == 0:
        return seed & _MASK
    z = (seed + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
