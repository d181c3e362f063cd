"""A request on the event loop: where its pieces go, when they left for the client, and what the log says at its end.

The engine thread knows when a token was sampled, the HTTP edge when its bytes were written to the socket. A client sees
the second, so that is what ``ttft_ms``, ``tpot_ms`` and ``e2e_ms`` of the log count to, from the request's first byte:

    arrival -queue-> first step -prefill-> first token -decode-> last step's answer -delivery-> last byte written

An answer that is not streamed has no first token on the wire; its ``ttft_ms`` and ``tpot_ms`` are the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from llm_serving.engine.observer import EngineLog, EngineMetrics
from llm_serving.errors import LLMServingError
from llm_serving.request import RequestOutput, RequestTimings
from llm_serving.statistics import time_per_output_token

__all__ = ["OpenRequest", "PieceSink", "RequestLog"]


class PieceSink(Protocol):
    """Takes a request's pieces, on the event loop, as soon as they are there. Must not raise."""

    def push(self, piece: RequestOutput, /) -> None:
        """The next piece; the last one is ``finished``."""

    def fail(self, error: LLMServingError, /) -> None:
        """The request was refused; no piece comes."""


class OpenRequest:
    """One request from ``AsyncEngine.open`` until it has ended and its reader is done with it.

    The reader says when output was ``delivered`` to the client (times on the engine's clock), and must ``close``.
    """

    __slots__ = ("_closed_at", "_first", "_last", "_on_close", "_requests", "arrival", "gone", "is_closed", "is_ended",
                 "last_piece", "request_id", "sink", "streamed")  # fmt: skip

    def __init__(
        self,
        request_id: str,
        arrival: float,
        sink: PieceSink,
        on_close: Callable[[OpenRequest], None],
        requests: RequestLog,
        *,
        streamed: bool,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.sink = sink
        self.streamed = streamed
        self.gone: asyncio.Event | None = None
        """Set when the request has ended, for one whose reader left before."""
        self.is_closed = False
        self.is_ended = False
        """Its last piece, or a refusal, has come."""
        self.last_piece: RequestOutput | None = None
        self._on_close = on_close
        self._requests = requests
        self._first: float | None = None
        self._last: float | None = None
        self._closed_at: float | None = None

    def take(self, piece: RequestOutput) -> None:
        """A piece from the engine."""
        if piece.finish_reason is not None:
            self.is_ended = True
            self.last_piece = piece
        if not self.is_closed:
            self.sink.push(piece)

    def refuse(self, error: LLMServingError) -> None:
        """The engine did not take the request in."""
        self.is_ended = True
        if not self.is_closed:
            self.sink.fail(error)

    def delivered(self, now: float) -> None:
        """Output of this request had been written to the client's socket by ``now``."""
        if self._first is None:
            self._first = now
            self._requests.first_token(self.request_id, now - self.arrival)
        self._last = now

    def close(self, now: float | None = None) -> None:
        """The reader is done: the whole answer was written by ``now`` (by default with the last ``delivered``).

        A request that has not ended is aborted. Further calls do nothing.
        """
        if not self.is_closed:
            self.is_closed = True
            self._closed_at = self._last if now is None else now
            self._on_close(self)

    def timings(self, piece: RequestOutput) -> RequestTimings:
        """The timings of a closed request that ended with ``piece``, counted to the last byte."""
        engine = piece.timings
        if engine is None:
            raise AssertionError(f"the last piece of {self.request_id} has no timings")
        finished = self.arrival + engine.e2e
        end = finished if self._closed_at is None else max(finished, self._closed_at)
        timings = replace(engine, delivery=end - finished, e2e=end - self.arrival)
        if not self.streamed:
            return timings
        if self._first is None or self._last is None:
            return replace(timings, ttft=None, tpot=None)
        tpot = time_per_output_token(self._first, self._last, piece.num_output_tokens)
        return replace(timings, ttft=self._first - self.arrival, tpot=tpot)


class RequestLog:
    """Writes a request's lines into the event log, and tells the metrics."""

    def __init__(self, log: EngineLog, metrics: EngineMetrics) -> None:
        self._log = log
        self._metrics = metrics

    def first_token(self, request_id: str, seconds: float) -> None:
        """A streamed request's first output left ``seconds`` after the request arrived."""
        self._log.event("first_token", request_id=request_id, ttft_ms=_ms(seconds))
        self._metrics.first_token(seconds)

    def request_end(self, output: RequestOutput, timings: RequestTimings) -> None:
        """A request ended with ``output``."""
        reason, tokens = output.finish_reason, output.num_output_tokens
        if reason is None:
            raise AssertionError(f"{output.request_id} has not ended")
        self._log.event(
            "request_end",
            request_id=output.request_id,
            prompt_tokens=output.num_prompt_tokens,
            output_tokens=tokens,
            total_tokens=output.num_prompt_tokens + tokens,
            finish_reason=reason.value,
            queue_ms=_ms(timings.queue),
            prefill_ms=_ms(timings.prefill),
            decode_ms=_ms(timings.decode),
            delivery_ms=_ms(timings.delivery),
            ttft_ms=None if timings.ttft is None else _ms(timings.ttft),
            tpot_ms=None if timings.tpot is None else _ms(timings.tpot),
            e2e_ms=_ms(timings.e2e),
            preemptions=timings.num_preemptions,
            **({"error": output.error} if output.error is not None else {}),
        )
        self._metrics.request_end(output, reason, timings)


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
