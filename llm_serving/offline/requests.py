"""Creates the JSON bodies of calls from the arguments of ``LLM``'s methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import orjson

from llm_serving.errors import RequestError
from llm_serving.sampling_params import SamplingParams

Sampling = Mapping[str, Any] | SamplingParams
"""Sampling parameters: a mapping with fields of the HTTP API, or ``SamplingParams``."""

_OWN = ("prompt", "messages", "input", "stream", "stream_options")
"""Fields of the HTTP API that ``sampling`` must not contain, because the methods of ``LLM`` set them."""
_ALWAYS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Parameters of ``SamplingParams`` that every body contains, even if they have their default."""
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_SKIPPED = ("logprobs", "top_logits", "logit_bias", "shown_token_ids", "keeps_history", "top_allowed", *_LISTS)


def prompts_of(prompts: object) -> list[str | Sequence[int]]:
    """Returns the argument ``prompts`` as a list: one text, one list of token ids, or a list of these."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise _wrong("prompts", "a text, token ids, or a list of either", prompts)
    if prompts and all(type(each) is int for each in prompts):
        return [list(prompts)]
    return list(prompts)


def conversations_of(conversations: object) -> list[Sequence[Mapping[str, Any]]]:
    """Returns the argument ``conversations`` as a list: one list of messages, or several in a list."""
    if not isinstance(conversations, Sequence) or isinstance(conversations, str):
        raise _wrong("conversations", "a list of messages, or a list of such lists", conversations)
    if conversations and all(isinstance(each, Mapping) for each in conversations):
        return [list(conversations)]
    return list(conversations)


def bodies_of(
    name: str, inputs: Sequence[object], sampling: Sampling | Sequence[Sampling] | None, more: Mapping[str, Any],
    *, is_chat: bool,
) -> list[bytes]:
    """Returns the body of a call for each input. The field ``name`` has the input. ``more`` are fields of every body.

    ``sampling`` applies to all inputs, or it is a list with one element for each input. Raises RequestError.
    """
    many = sampling if isinstance(sampling, Sequence) else [sampling] * len(inputs)
    if len(many) != len(inputs):
        raise RequestError(
            f"'sampling' has {len(many)} entries for {len(inputs)} inputs; give one for all, or one for each.",
            param="sampling",
            code="invalid_value",
        )
    encoded: dict[int, dict[str, Any]] = {}
    bodies = []
    for value, each in zip(inputs, many, strict=True):
        if id(each) not in encoded:
            encoded[id(each)] = {**fields_of(each, is_chat=is_chat), **more}
        bodies.append(_json({**encoded[id(each)], name: value}))
    return bodies


def fields_of(sampling: Sampling | None, *, is_chat: bool) -> dict[str, Any]:
    """Converts sampling parameters to fields of the HTTP API. Raises RequestError for the fields in ``_OWN``."""
    if sampling is None:
        return {}
    if isinstance(sampling, SamplingParams):
        return _params_fields(sampling, is_chat=is_chat)
    if not isinstance(sampling, Mapping):
        raise _wrong("sampling", "a dict of the HTTP API's fields, or SamplingParams", sampling)
    for name in _OWN:
        if name in sampling:
            raise RequestError(
                f"'{name}' is not a sampling parameter of an LLM in a program; leave it out.",
                param=name,
                code="unknown_parameter",
            )
    return dict(sampling)


def _params_fields(params: SamplingParams, *, is_chat: bool) -> dict[str, Any]:
    defaults = SamplingParams()
    given = {each.name: getattr(params, each.name) for each in fields(SamplingParams) if each.name not in _SKIPPED}
    values = {
        name: value for name, value in given.items() if name in _ALWAYS or value != getattr(defaults, name)
    }
    values |= {name: sorted(found) if isinstance(found := getattr(params, name), frozenset) else list(found)
               for name in _LISTS if getattr(params, name)}  # fmt: skip
    if params.logit_bias:
        values["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.wants_logits and is_chat:
        values |= {"logprobs": True, "top_logprobs": params.top_logits}
    elif params.wants_logits:
        values["logprobs"] = params.top_logits
    return values


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise RequestError(f"The request is not JSON: {error}.", code="invalid_type") from None


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"'{name}' should be {wanted}; got {value!r:.80}.", param=name, code="invalid_type")
