"""A request on the event loop: where its pieces go, when they left for the client, and what the log says at its end.

The engine thread knows when a token was sampled, the HTTP edge when its bytes were written to the socket. A client sees
the second, so that is what ``ttft_ms``, ``tpot_ms`` and ``e2e_ms`` of the log count to, from the request's first byte:

    arrival -tokenise-> queue -queue-> first step -prefill-> first token -decode-> last step's answer -delivery-> last
    byte written; between first token and last step's answer a request may also be preempted, swapped or restarted

An answer that is not streamed has no first token on the wire; its ``ttft_ms`` and ``tpot_ms`` are the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from llm_serving.engine.receipts import RequestReceipt, receipt_of
from llm_serving.engine.request_log import RequestLog
from llm_serving.errors import LLMServingError
from llm_serving.request import Request, RequestOutput, RequestTimings
from llm_serving.telemetry.receipt import microseconds
from llm_serving.telemetry.statistics import time_per_output_token

__all__ = ["OpenRequest", "PieceSink"]


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

    __slots__ = ("_closed_at", "_first", "_last", "_on_close", "_requests", "gone", "is_closed", "is_ended",
                 "last_piece", "quiet", "request", "sink", "streamed")  # fmt: skip

    def __init__(
        self,
        request: Request,
        sink: PieceSink,
        on_close: Callable[[OpenRequest], None],
        requests: RequestLog,
        *,
        streamed: bool,
        quiet: bool = False,
    ) -> None:
        self.request = request
        self.sink = sink
        self.streamed = streamed
        self.quiet = quiet
        """A step of something larger, of whose end nothing is told."""
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

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def arrival(self) -> float:
        return self.request.arrival_time

    def receipt(self, now: float) -> RequestReceipt:
        """Where the time went until ``now``."""
        return receipt_of(self.request, now)

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
        delivery = 0.0
        if self._closed_at is not None:
            arrival_us, ended_us = microseconds(self.arrival), microseconds(engine.e2e)
            delivery = max(0, microseconds(self._closed_at) - arrival_us - ended_us) / 1e6
        timings = replace(engine, delivery=delivery, e2e=round(engine.e2e + delivery, 6))
        if not self.streamed:
            return timings
        if self._first is None or self._last is None:
            return replace(timings, ttft=None, tpot=None)
        tpot = time_per_output_token(self._first, self._last, piece.num_output_tokens)
        return replace(timings, ttft=self._first - self.arrival, tpot=tpot)
