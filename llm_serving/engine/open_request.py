"""A request on the event loop: passes the pieces of its output to the HTTP handler, and records when they were sent.

The engine thread knows when a token was sampled. The HTTP edge knows when the token's bytes were written to the socket,
which is closer to the time that a client sees. In the log, ``ttft_ms``, ``tpot_ms`` and ``e2e_ms`` therefore begin with
the request's first byte and end when bytes are written to the socket. The arrows show the phases between these times:

    arrival -tokenise-> queue -queue-> first step -prefill-> first token -decode-> result of the last step -delivery->
    last byte written

Between the first token and the last step, a request may also be preempted, swapped or restarted. If a response is not
streamed, its first token is not sent separately. Then ``ttft_ms`` ends when the engine has the first token, and
``tpot_ms`` when it has the last token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from llm_serving.engine.outputs import MERGE_AT, merge_outputs
from llm_serving.engine.receipts import RequestReceipt, receipt_of
from llm_serving.engine.request_log import RequestLog
from llm_serving.errors import LLMServingError
from llm_serving.lora.registry import Adapter
from llm_serving.request import Request, RequestOutput, RequestTimings
from llm_serving.telemetry.receipt import microseconds
from llm_serving.telemetry.statistics import time_per_output_token


class PieceSink(Protocol):
    """Receives the pieces of one or more requests on the event loop, as soon as they arrive.

    Its methods must not raise.
    """

    def push(self, index: int, piece: RequestOutput, /) -> None:
        """Receives the next piece of request ``index``. The last piece has ``finished`` set."""

    def fail(self, error: LLMServingError, /) -> None:
        """Receives the error of a request that was refused. The request has no pieces."""


class OpenRequest:
    """One request of ``AsyncEngine.open``, until it has ended and its reader has closed it.

    The reader must call ``delivered`` when output was written to the client's socket, and ``close`` at the end. All
    times are on the engine's clock.
    """

    __slots__ = (
        "_closed_at",
        "_first",
        "_last",
        "_on_close",
        "_requests",
        "adapter",
        "ended",
        "index",
        "is_closed",
        "is_ended",
        "last_piece",
        "quiet",
        "request",
        "sink",
        "streamed",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        sink: PieceSink,
        index: int,
        on_close: Callable[[OpenRequest], None],
        requests: RequestLog,
        *,
        streamed: bool,
        quiet: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        self.request = request
        self.sink = sink
        self.index = index
        """Index of the request among the requests that have the same sink."""
        self.streamed = streamed
        self.quiet = quiet
        """True for an internal request, for example of a beam search or a canary. The log has no line for its end."""
        self.adapter = adapter
        """The LoRA adapter that the request uses, or None."""
        self.ended: asyncio.Event | None = None
        """An event that is set when the request ends. ``close`` creates it if the request has not ended by then."""
        self.is_closed = False
        self.is_ended = False
        """True after the last piece, or the refusal, has arrived."""
        self.last_piece: RequestOutput | None = None
        self._on_close = on_close
        self._requests = requests
        self._first: float | None = None
        self._last: float | None = None
        self._closed_at: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that were generated until now."""
        return len(self.request.output_token_ids)

    def receipt(self, now: float) -> RequestReceipt:
        """Returns the time that the request has spent in each phase until ``now``."""
        return receipt_of(self.request, now)

    def delivered(self, now: float) -> None:
        """Records that output of this request was written to the client's socket at ``now``."""
        if self._first is None:
            self._first = now
            self._requests.first_token(self.request.request_id, now - self.request.arrival_time)
        self._last = now

    def close(self, now: float | None = None) -> None:
        """Records that the reader needs no more pieces. Aborts a request that has not ended. Further calls have no
        effect.

        ``now`` is the time at which the last byte of the response was written. The default is the time of the last
        ``delivered``.
        """
        if not self.is_closed:
            self.is_closed = True
            self._closed_at = self._last if now is None else now
            self._on_close(self)

    def timings(self, piece: RequestOutput) -> RequestTimings:
        """Returns the durations of a closed request's phases, up to the last byte on the socket.

        ``piece`` is its last piece.
        """
        engine, arrival = piece.timings, self.request.arrival_time
        if engine is None:
            raise AssertionError(f"the last piece of {self.request.request_id} has no timings")
        delivery = 0.0
        if self._closed_at is not None:
            delivery = max(0, microseconds(self._closed_at) - microseconds(arrival) - microseconds(engine.e2e)) / 1e6
        timings = replace(engine, delivery=delivery, e2e=round(engine.e2e + delivery, 6))
        if not self.streamed:
            return timings
        if self._first is None or self._last is None:
            return replace(timings, ttft=None, tpot=None)
        tpot = time_per_output_token(self._first, self._last, piece.num_output_tokens)
        return replace(timings, ttft=self._first - arrival, tpot=tpot)


class PieceStream:
    """A ``PieceSink`` of one request that stores the pieces until the reader asks for them with ``next``."""

    __slots__ = ("_error", "_pieces", "_waiter")

    def __init__(self) -> None:
        self._pieces: list[RequestOutput] = []
        self._error: LLMServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, index: int, piece: RequestOutput) -> None:
        self._pieces.append(piece)
        if len(self._pieces) >= MERGE_AT:
            self._pieces = [merge_outputs(self._pieces)]
        self._notify()

    def fail(self, error: LLMServingError) -> None:
        self._error = error
        self._notify()

    async def next(self) -> RequestOutput:
        """Waits for the next piece.

        Pieces that arrived since the last call are merged into one. Raises the error if the engine refused the request.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return merge_outputs(pieces)

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
