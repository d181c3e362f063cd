"""Selects the values of requests and results that a flight recording keeps. These values contain no text and no token
id.

For a request: lengths, times, priorities and the sampling parameters that differ from their defaults. For a result:
which sequences ended their requests, and the device's times. Token ids, stop strings and error texts are never
recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from llm_serving.flight.pseudonyms import ENDING_TOKEN, PLAIN_TOKEN
from llm_serving.ipc.drafts import REJECTED
from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.request import Request, RequestStatus
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.telemetry.receipt import Receipt, microseconds

_SCALARS = (bool, int, float, str, bytes)


def _plain_defaults(kind: type, hidden: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """Returns (name, default) of the dataclass fields that a recording may contain.

    These are the fields whose default is None or a plain value (a bool, number, text or bytes). Fields in ``hidden``
    are left out.
    """
    return tuple(
        (declared.name, declared.default)
        for declared in fields(kind)
        if declared.name not in hidden and isinstance(declared.default, (*_SCALARS, type(None)))
    )


_REQUEST_DEFAULTS = _plain_defaults(Request, ("request_id", "arrival_time", "status"))
_SAMPLING_DEFAULTS = _plain_defaults(SamplingParams, ("max_tokens", "ignore_eos"))
_REQUEST_VALUES = attrgetter(*(name for name, _ in _REQUEST_DEFAULTS))
_SAMPLING_VALUES = attrgetter(*(name for name, _ in _SAMPLING_DEFAULTS))


def request_facts(request: Request) -> dict[str, Any]:
    """Returns the values that a recording keeps about a new request, as a map. Default values and tokens are left out.
    """
    sampling = request.sampling
    facts: dict[str, Any] = {
        "request_id": request.request_id,
        "arrival_time": request.arrival_time,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": sampling.max_tokens,
    }
    for (name, default), value in zip(_REQUEST_DEFAULTS, _REQUEST_VALUES(request), strict=True):
        if value != default and isinstance(value, _SCALARS):
            facts[name] = value
    values = zip(_SAMPLING_DEFAULTS, _SAMPLING_VALUES(sampling), strict=True)
    if others := {name: value for (name, default), value in values if value != default}:
        facts["sampling"] = others
    if request.receipt.start_us != microseconds(request.arrival_time):
        facts["receipt_start"] = request.receipt.start_us / 1e6
    return facts


def make_request(facts: dict[str, Any], prompt: list[int] | None) -> Request:
    """Creates a request from ``facts``, the recorded map that ``request_facts`` returned.

    ``prompt`` has the pseudonyms of the prompt's tokens, or is None if the recording has no pseudonyms.
    """
    values = dict(facts)
    num_prompt_tokens = values.pop("num_prompt_tokens")
    sampling = SamplingParams(max_tokens=values.pop("max_tokens"), **values.pop("sampling", {}))
    tokens = [PLAIN_TOKEN] * num_prompt_tokens if prompt is None else prompt
    request_id, arrival = values.pop("request_id"), values.pop("arrival_time")
    request = Request(request_id, tokens, sampling, arrival, frozenset({ENDING_TOKEN}))
    request.receipt = Receipt(values.pop("receipt_start", arrival))
    for name, value in values.items():
        setattr(request, name, value)
    assert request.status is RequestStatus.WAITING
    return request


def is_gone(request: Request) -> bool:
    """Returns True if the request has ended and no step in flight uses its blocks or its batch row."""
    return request.is_finished and request.row < 0


def ending_tokens(request: Request) -> frozenset[int]:
    """Returns the token ids that end a request's output: its stop tokens, and the model's end tokens unless the request
    sets ``ignore_eos``.
    """
    stop_token_ids = request.sampling.stop_token_ids
    return stop_token_ids if request.sampling.ignore_eos else stop_token_ids | request.end_token_ids


def ending_indices(step: ScheduledStep, sampled_ids: list[int]) -> list[int]:
    """Returns the indices of the sequences in a step whose sampled token ends the request."""
    if len(sampled_ids) != len(step.requests):
        return []
    return [
        index
        for index, (request, token_id) in enumerate(zip(step.requests, sampled_ids, strict=True))
        if token_id in request.end_token_ids or token_id in request.sampling.stop_token_ids
        if token_id in ending_tokens(request)
    ]


def is_whole(step: ScheduledStep, sampled_ids: list[int], num_logits: int, num_logsumexps: int) -> bool:
    """Returns True if the result of ``step`` has a value for each sequence of the step.

    Each column of the result must have one value per sequence. A sequence must have a token id (0 or more) if the step
    samples it, and no token id otherwise. In a step with drafts, ``REJECTED`` counts as a token id.
    """
    if not len(sampled_ids) == num_logits == num_logsumexps == len(step.rows):
        return False
    if step.num_drafts:
        return min(token_id for token_id in sampled_ids if token_id != REJECTED) >= 0
    if all(step.do_sample):
        return min(sampled_ids, default=0) >= 0
    return [token_id >= 0 for token_id in sampled_ids] == step.do_sample


def make_result(
    seq: int,
    do_sample: list[bool],
    fault: list[Any] | None,
    ends: list[int],
    names: list[int] | None,
    times: tuple[int, int, int],
    rejected: Sequence[int] = (),
    bad_moves: Sequence[int] = (),
) -> StepResult:
    """Creates a result for a replay. For the scheduler, it is equivalent to the recorded result.

    ``do_sample`` states for each sequence of the step whether the step samples its next token. ``ends`` are the indices
    of the sequences whose token ended the request. ``rejected`` are the indices of the sampled tokens that do not count
    because a draft before them was wrong. ``bad_moves`` are the indices of the block moves that failed. A recording has
    no tokens, so the result has the pseudonyms ``names`` instead of token ids. If ``names`` is None, it has
    ``ENDING_TOKEN`` for a token that ended a request, and ``PLAIN_TOKEN`` for any other.
    """
    result = StepResult(seq, bad_moves=list(bad_moves), queue_us=times[0], graph_us=times[1], sample_us=times[2])
    signs, num_logits, num_sums = do_sample, len(do_sample), len(do_sample)
    if fault is not None:
        result.aborted = fault[0]
        result.error = "the step failed" if fault[1] else None
        signs, num_logits, num_sums = fault[2]
    if names is None:
        names = [PLAIN_TOKEN] * len(signs)
        for index in ends:
            names[index] = ENDING_TOKEN
    result.sampled_ids = [
        NOT_FINITE if samples == NOT_FINITE else names[index] if samples else -1 for index, samples in enumerate(signs)
    ]
    for index in rejected:
        result.sampled_ids[index] = REJECTED
    result.logits = [0.0] * num_logits
    result.logsumexps = [0.0] * num_sums
    return result
