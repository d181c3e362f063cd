"""The requests in the engine thread: taken in, and turned into pieces of text."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from llm_serving.engine.observer import EngineLog
from llm_serving.engine.outputs import DetokenizerFactory, RequestStream
from llm_serving.request import FinishReason, Request, RequestOutput, RequestStatus
from llm_serving.scheduler.output import RequestUpdate, StepResult
from llm_serving.scheduler.protocols import RequestFront
from llm_serving.telemetry.receipt import Phase

__all__ = ["RequestTracker"]


class RequestTracker:
    """Stands between the scheduler, which knows tokens, and the streams, which are text."""

    def __init__(self, scheduler: RequestFront, detokenizer: DetokenizerFactory, log: EngineLog) -> None:
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._log = log
        self._streams: dict[str, RequestStream] = {}

    def add(self, request: Request) -> None:
        """Take a request in. Raises RequestError as ``Scheduler.add_request`` does."""
        stream = RequestStream(request, self._detokenizer(request))
        self._scheduler.add_request(request)
        self._streams[request.request_id] = stream

    def abort(self, request_id: str, now: float) -> list[RequestOutput]:
        """End a request that is (still) here; its last piece."""
        update = self._scheduler.abort_request(request_id, now)
        return [] if update is None else self.outputs([update], None, now)

    def take_ended(self, now: float) -> list[RequestOutput]:
        """The last pieces of requests that the scheduler ended by itself: their deadline has passed."""
        return self.outputs(self._scheduler.take_ended(), None, now)

    def fail_all(self, error: str, now: float) -> list[RequestOutput]:
        """End every request with an error; their last pieces."""
        return self.outputs(self._scheduler.fail_all(error, now), None, now)

    def abandon_all(self, error: str, now: float) -> list[RequestOutput]:
        """``fail_all`` for when the scheduler cannot be trusted any more: it is not asked, nor the detokenizers."""
        outputs = []
        for request_id, stream in list(self._streams.items()):
            request = stream.request
            request.status, request.finish_reason, request.finish_time = RequestStatus.FINISHED, FinishReason.ERROR, now
            if request.receipt.phase is not Phase.DONE:
                request.receipt.enter(Phase.DONE, now)
            outputs.append(stream.output(RequestUpdate(request, error=error), None, "", None))
            del self._streams[request_id]
        return outputs

    def outputs(self, updates: Iterable[RequestUpdate], result: StepResult | None, now: float) -> list[RequestOutput]:
        """The next piece of each request's stream."""
        return [self._output(update, result, now) for update in updates]

    def _output(self, update: RequestUpdate, result: StepResult | None, now: float) -> RequestOutput:
        request = update.request
        stream = self._streams[request.request_id]
        try:
            text, stop_string = stream.advance(update)
        except Exception as error:  # a detokenizer that fails ends its request, and no other
            self._log.error("a detokenizer failed", request_id=request.request_id, traceback=traceback.format_exc())
            update.error = f"the text could not be decoded: {error}"
            self._end(request, FinishReason.ERROR, now)
            text, stop_string = "", None
        else:
            if stop_string is not None:
                self._end(request, FinishReason.STOP, now)
        output = stream.output(update, result, text, stop_string)
        if output.finish_reason is not None:
            del self._streams[request.request_id]
        return output

    def _end(self, request: Request, reason: FinishReason, now: float) -> None:
        if self._scheduler.finish_request(request.request_id, reason, now) is None:
            request.finish_reason = reason
