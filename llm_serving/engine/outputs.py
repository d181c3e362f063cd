"""From tokens to the pieces of a request's stream: text, stop strings, log-probabilities, timings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llm_serving.errors import LLMServingError
from llm_serving.request import Blocked, FinishReason, Request, RequestOutput, RequestTimings, TokenLogits
from llm_serving.scheduler.output import RequestUpdate, StepResult
from llm_serving.telemetry.receipt import BlockReason, Phase, Receipt, microseconds
from llm_serving.telemetry.statistics import time_per_output_token

__all__ = [
    "MERGE_AT",
    "Detokenizer",
    "DetokenizerFactory",
    "EngineOutput",
    "ProbeAnswer",
    "RequestRefused",
    "RequestStream",
    "merge_outputs",
    "request_timings",
]


MERGE_AT = 32
"""Pieces a slow reader may pile up before they are merged into one, so that a stream's backlog stays small."""


class Detokenizer(Protocol):
    """Text of one growing sequence. See ``llm_serving.engine.detokenizer.IncrementalDetokenizer``."""

    def append(self, token_ids: Sequence[int], /) -> tuple[str, str | None]:
        """The text that these tokens make certain, and the stop string that ended it, if one did."""

    def flush(self) -> str:
        """The text held back, when no more tokens come."""


DetokenizerFactory = Callable[[Request], Detokenizer]


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request that was not taken in; nothing else follows for it."""

    request_id: str
    error: LLMServingError


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Every agent answered."""


EngineOutput = RequestOutput | RequestRefused | ProbeAnswer


class RequestStream:
    """What the engine thread keeps for a request beside the scheduler: the state of its text."""

    __slots__ = ("_detokenizer", "_wants_logits", "request")

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self.request = request
        self._detokenizer = detokenizer
        self._wants_logits = request.sampling.wants_logits

    def advance(self, update: RequestUpdate) -> tuple[str, str | None]:
        """The text this update makes certain, and the stop string it completes.

        The token that ends a sequence is no part of its text, unless ``include_stop_str_in_output`` says so.
        """
        request = self.request
        if request.finish_reason is None and update.token_id is not None:
            return self._detokenizer.append((update.token_id,))
        text, stop = "", None
        ends = request.finish_reason is FinishReason.STOP
        if update.token_id is not None and (not ends or request.sampling.include_stop_str_in_output):
            text, stop = self._detokenizer.append((update.token_id,))
        if request.is_finished and stop is None:
            text += self._detokenizer.flush()
        return text, stop

    def output(
        self, update: RequestUpdate, result: StepResult | None, text: str, stop_string: str | None
    ) -> RequestOutput:
        """The next piece of the stream; the last one if the request is finished by now."""
        request = self.request
        token_ids: tuple[int, ...] = ()
        logits: tuple[TokenLogits, ...] = ()
        if update.token_id is not None:
            token_ids = (update.token_id,)
            if self._wants_logits and result is not None:
                logits = (_token_logits(result, update.index),)
        reason = request.finish_reason
        num_tokens = len(request.output_token_ids)
        if reason is None:  # every token but the last comes this way
            return RequestOutput(request.request_id, text, token_ids, logits, len(request.prompt_token_ids), num_tokens)
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            logits=logits,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=num_tokens,
            finish_reason=reason,
            stop_reason=update.stop_token_id if stop_string is None else stop_string,
            error=update.error,
            timings=request_timings(request),
            num_cached_tokens=request.num_cached_tokens,
        )


def _token_logits(result: StepResult, index: int) -> TokenLogits:
    logit, logsumexp = result.logits[index], result.logsumexps[index]
    top = result.tops[index] if result.tops is not None else ()
    return TokenLogits(result.sampled_ids[index], logit - logsumexp, logsumexp, top)


def request_timings(request: Request, now: float | None = None) -> RequestTimings:
    """Where a request's time went until ``now``, or for one that has ended, by default, until its last step.

    What is after the last step counts as ``delivery``.
    """
    receipt = request.receipt
    has_ended = receipt.phase is Phase.DONE
    if now is None and not has_ended:
        raise AssertionError(f"{request.request_id} has not ended")
    phase_us = receipt.phase_us if now is None else receipt.phases_until(now)
    delivery_us = max(0, microseconds(now) - receipt.end_us) if has_ended and now is not None else 0
    tokenise_us = max(0, receipt.start_us - microseconds(request.arrival_time))
    first_token = request.first_token_time
    return RequestTimings(
        tokenise=tokenise_us / 1e6,
        queue=phase_us[Phase.QUEUED] / 1e6,
        prefill=phase_us[Phase.PREFILL] / 1e6,
        decode=phase_us[Phase.DECODE] / 1e6,
        preempted=phase_us[Phase.PREEMPTED] / 1e6,
        swapped=phase_us[Phase.SWAPPED] / 1e6,
        restarted=phase_us[Phase.RESTARTED] / 1e6,
        delivery=delivery_us / 1e6,
        e2e=(tokenise_us + sum(phase_us) + delivery_us) / 1e6,
        ttft=None if first_token is None else first_token - request.arrival_time,
        tpot=_time_per_output_token(request),
        num_preemptions=request.num_preemptions,
        num_swaps=receipt.swaps,
        num_chunks=receipt.chunks,
        num_cached_tokens=request.num_cached_tokens,
        blocked=_blocked(receipt, receipt.blocked_us if now is None else receipt.blocked_until(now)),
        blocked_by=tuple(receipt.blockers),
    )


def _time_per_output_token(request: Request) -> float | None:
    """None before the end."""
    if request.first_token_time is None or request.finish_time is None:
        return None
    return time_per_output_token(request.first_token_time, request.finish_time, len(request.output_token_ids))


def _blocked(receipt: Receipt, blocked_us: Mapping[BlockReason, int]) -> tuple[Blocked, ...]:
    times = receipt.num_blocked.copy()
    blocked = [
        Blocked(reason, times.get(reason, 0), blocked_us.get(reason, 0) / 1e6)
        for reason in BlockReason
        if reason in times or reason in blocked_us
    ]
    return tuple(sorted(blocked, key=lambda one: (-one.seconds, -one.times, one.reason.value)))


def merge_outputs(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """Pieces of one stream that piled up, in order, as one piece."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return replace(
        last,
        text="".join([piece.text for piece in pieces]),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logits=tuple(logits for piece in pieces for logits in piece.logits),
    )
