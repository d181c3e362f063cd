"""Turns the scheduler's tokens into pieces of text, in the engine thread."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llm_serving.engine.receipts import request_timings
from llm_serving.request import FinishReason, Request, RequestOutput, RequestStatus, TokenLogits
from llm_serving.routing.sources import RequestFront
from llm_serving.scheduler.output import RequestUpdate, StepResult
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.receipt import Phase


class Detokenizer(Protocol):
    """The text of one growing sequence. See ``llm_serving.engine.detokenizer.IncrementalDetokenizer``."""

    def append(self, token_ids: Sequence[int], /) -> tuple[str, str | None]:
        """Returns the text that these tokens complete, and the stop string that ended the text, if there was one."""

    def flush(self) -> str:
        """Returns the text that was held back as the possible start of a stop string, because no more tokens follow."""


DetokenizerFactory = Callable[[Request], Detokenizer]


@dataclass(frozen=True, slots=True)
class _Stream:
    request: Request
    detokenizer: Detokenizer
    wants_logits: bool
    num_prompt_tokens: int


class TextStreams:
    """The streams of text of all requests in the engine."""

    def __init__(self, front: RequestFront, log: EventLog) -> None:
        """``front`` is the scheduler or the router. ``TextStreams`` calls it to end a request whose text contains a
        stop string.
        """
        self._front = front
        self._log = log
        self._streams: dict[str, _Stream] = {}

    def add(self, request: Request, detokenizer: Detokenizer) -> None:
        """Opens the stream of a request that the scheduler has accepted."""
        self._streams[request.request_id] = _Stream(
            request, detokenizer, request.sampling.wants_logits, len(request.prompt_token_ids)
        )

    def outputs(self, updates: Iterable[RequestUpdate], result: StepResult | None, now: float) -> list[RequestOutput]:
        """Returns the next piece of each updated request. The last piece closes the stream.

        No two updates may belong to the same request.
        """
        return [self._output(update, result, now) for update in updates]

    def outputs_of_drafts(
        self, updates: Iterable[RequestUpdate], result: StepResult, now: float
    ) -> list[RequestOutput]:
        """Returns the next pieces of each updated request, for the result of a step that verified drafts.

        The result may have several tokens of a request. If one of them ends the text, the later ones are dropped.
        """
        outputs: list[RequestOutput] = []
        cut: Request | None = None
        for update in updates:
            if update.request is not cut:
                outputs.append(self._output(update, result, now))
                if update.num_later and outputs[-1].finish_reason is not None:
                    cut = update.request
        return outputs

    def fail(self, update: RequestUpdate, error: str, now: float) -> None:
        """Ends the request of ``update`` with an error.

        The next call of ``outputs`` with this update returns the last piece.
        """
        update.error = error
        self._end(update.request, FinishReason.ERROR, now)

    def abandon_all(self, error: str, now: float) -> list[RequestOutput]:
        """Ends every stream with an error, and returns the last pieces.

        This method does not use the scheduler or the detokenizers, because they may have failed.
        """
        outputs = []
        for request_id, stream in list(self._streams.items()):
            request = stream.request
            request.status, request.finish_reason, request.finish_time = RequestStatus.FINISHED, FinishReason.ERROR, now
            if request.receipt.phase is not Phase.DONE:
                request.receipt.enter(Phase.DONE, now)
            outputs.append(_last_output(RequestUpdate(request, error=error), "", (), (), None))
            del self._streams[request_id]
        return outputs

    def _output(self, update: RequestUpdate, result: StepResult | None, now: float) -> RequestOutput:
        request, token_id = update.request, update.token_id
        stream = self._streams[request.request_id]
        token_ids = () if token_id is None else (token_id,)
        is_last = request.finish_reason is not None and (not update.num_later or update.error is not None)
        try:
            if not is_last:  # the usual case
                text, stop_string = stream.detokenizer.append(token_ids)
            else:
                text, stop_string = _last_text(stream, token_ids)
        except Exception as error:  # if a detokenizer fails, only its own request ends
            self._log.error("a detokenizer failed", request_id=request.request_id, traceback=traceback.format_exc())
            update.error = f"the text could not be decoded: {error}"
            self._end(request, FinishReason.ERROR, now)
            text, stop_string, is_last = "", None, True
        else:
            if stop_string is not None:
                self._end(request, FinishReason.STOP, now)
                is_last = True
        logits: tuple[TokenLogits, ...] = ()
        if stream.wants_logits and token_ids and result is not None:
            logits = (_token_logits(result, update.index),)
        if not is_last:
            num_tokens = len(request.output_token_ids) - update.num_later
            return RequestOutput(request.request_id, text, token_ids, logits, stream.num_prompt_tokens, num_tokens)
        del self._streams[request.request_id]
        if update.num_later:
            del request.output_token_ids[-update.num_later :]
        output = _last_output(update, text, token_ids, logits, stop_string)
        if result is not None and result.pooled is not None and token_ids:
            output.pooled = result.pooled[update.index]
        return output

    def _end(self, request: Request, reason: FinishReason, now: float) -> None:
        if self._front.finish_request(request.request_id, reason, now) is None:
            request.finish_reason = reason  # the scheduler has already ended the request, so only the reason changes


def _last_text(stream: _Stream, token_ids: tuple[int, ...]) -> tuple[str, str | None]:
    """Returns the text of a finished request's last piece, and the stop string that ended the text, if there was one.

    The token that ends a sequence is not part of the text, unless ``include_stop_str_in_output`` asks for it.
    """
    request, text, stop = stream.request, "", None
    if request.finish_reason is not FinishReason.STOP or request.sampling.include_stop_str_in_output:
        text, stop = stream.detokenizer.append(token_ids)
    return (text + stream.detokenizer.flush(), None) if stop is None else (text, stop)


def _last_output(
    update: RequestUpdate,
    text: str,
    token_ids: tuple[int, ...],
    logits: tuple[TokenLogits, ...],
    stop_string: str | None,
) -> RequestOutput:
    request = update.request
    return RequestOutput(
        request_id=request.request_id,
        text=text,
        token_ids=token_ids,
        logits=logits,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(request.output_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=update.stop_token_id if stop_string is None else stop_string,
        error=update.error,
        timings=request_timings(request),
        num_cached_tokens=request.num_cached_tokens,
    )


def _token_logits(result: StepResult, index: int) -> TokenLogits:
    logit, logsumexp = result.logits[index], result.logsumexps[index]
    top = result.tops[index] if result.tops is not None else ()
    return TokenLogits(result.sampled_ids[index], logit - logsumexp, logsumexp, top)
