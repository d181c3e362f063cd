"""Tests the log events and metrics of a request.

The measured times of a request end when its bytes have been written to the client.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llm_serving.engine.open_request import OpenRequest
from llm_serving.engine.request_log import RequestLog
from llm_serving.request import PARTS, FinishReason, RequestOutput, RequestTimings
from support.fakes import RecordingLog, RecordingMetrics, make_request
from support.served_engine import Served, Sink, served

ARRIVAL = 100.0


def last_piece(tokens: int = 5, reason: FinishReason = FinishReason.LENGTH) -> RequestOutput:
    """Returns the last piece of a request, 0.9 s after its arrival. The first token came 0.3 s after the arrival."""
    ttft = 0.3 if tokens else None
    timings = RequestTimings(queue=0.1, prefill=0.2, decode=0.6, e2e=0.9, ttft=ttft, tpot=0.15)
    return RequestOutput("r", "", (), (), 10, tokens, reason, timings=timings)


class Recorded:
    """An open request. Its log events and metrics are recorded."""

    def __init__(self, *, streamed: bool = True) -> None:
        self.log, self.metrics, self.closed = RecordingLog(), RecordingMetrics(), 0
        self.requests = RequestLog(self.log, self.metrics)
        self.request = make_request("r", 10, arrival=ARRIVAL)
        self.opened = OpenRequest(self.request, Sink(), 0, self._on_close, self.requests, streamed=streamed)

    def _on_close(self, opened: OpenRequest) -> None:
        self.closed += 1

    def take(self, piece: RequestOutput) -> None:
        """Receives the last piece, as ``AsyncEngine`` does."""
        self.opened.is_ended, self.opened.last_piece = True, piece

    def end(self) -> dict[str, Any]:
        """Returns the ``request_end`` event.

        Checks that the times of the request's phases add up to its total time.
        """
        piece = self.opened.last_piece
        assert piece is not None
        self.requests.request_end(piece, self.opened.timings(piece), self.request)
        (line,) = self.log.named("request_end")
        phases = [line[f"{part}_ms"] for part in PARTS]
        assert round(sum(phases), 3) == line["e2e_ms"]  # type: ignore[arg-type]
        assert min(phases) >= 0  # type: ignore[type-var]
        return line


def test_a_streams_times_are_those_of_its_bytes() -> None:
    told = Recorded()
    told.opened.delivered(ARRIVAL + 0.31)
    told.opened.delivered(ARRIVAL + 0.5)
    told.take(last_piece())
    told.opened.delivered(ARRIVAL + 0.91)
    told.opened.close()
    line = told.end()
    assert told.log.named("first_token") == [{"request_id": "r", "ttft_ms": 310.0}]
    assert told.metrics.first_tokens == [pytest.approx(0.31)]
    assert (line["ttft_ms"], line["tpot_ms"], line["delivery_ms"], line["e2e_ms"]) == (310.0, 150.0, 10.0, 910.0)


def test_a_client_that_reads_slowly_shows_as_delivery() -> None:
    told = Recorded()
    told.opened.delivered(ARRIVAL + 0.4)
    told.take(last_piece())
    told.opened.delivered(ARRIVAL + 5.4)
    told.opened.close()
    line = told.end()
    assert (line["decode_ms"], line["delivery_ms"], line["e2e_ms"], line["tpot_ms"]) == (600.0, 4500.0, 5400.0, 1250.0)


def test_an_answer_that_is_not_streamed_has_the_engines_first_token_and_ends_with_its_bytes() -> None:
    told = Recorded(streamed=False)
    told.take(last_piece())
    told.opened.close(ARRIVAL + 1.0)
    line = told.end()
    assert (line["ttft_ms"], line["tpot_ms"], line["delivery_ms"], line["e2e_ms"]) == (300.0, 150.0, 100.0, 1000.0)
    assert told.log.named("first_token") == []


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_client_that_left_before_its_first_output_is_logged(tokens: int) -> None:
    told = Recorded()
    told.opened.close(ARRIVAL + 0.2)
    told.take(last_piece(tokens, FinishReason.ABORT))
    line = told.end()
    assert (line["ttft_ms"], line["tpot_ms"], line["delivery_ms"], line["e2e_ms"]) == (None, None, 0.0, 900.0)
    assert (line["finish_reason"], line["output_tokens"]) == ("abort", tokens)


def test_closing_twice_is_closing_once() -> None:
    told = Recorded()
    told.opened.close(ARRIVAL + 1)
    told.opened.close(ARRIVAL + 2)
    assert told.closed == 1


def run_one(serving: Served, sink: Sink, **options: Any) -> OpenRequest:
    request = make_request("a", 5, 4)
    return serving.engine.open("a", request.prompt_token_ids, request.sampling, sink, **options)


def test_the_line_comes_when_the_answer_was_delivered() -> None:
    async def run() -> None:
        async with served() as serving:
            sink = Sink()
            opened = run_one(serving, sink)
            await serving.until(lambda: opened.is_ended)
            assert serving.log.named("request_end") == []
            opened.delivered(serving.engine._clock() + 10.0)
            opened.close()
            (line,) = serving.log.named("request_end")
            assert line["delivery_ms"] > 9000.0  # type: ignore[operator]
            assert [piece.finished for piece in sink.pieces] == [False, False, False, True]

    asyncio.run(run())


def test_closing_aborts_and_the_line_comes_with_the_engines_end() -> None:
    async def run() -> None:
        async with served() as serving:
            serving.executor.hold(True)
            sink = Sink()
            opened = run_one(serving, sink)
            await serving.until(lambda: serving.engine.status().figures.running == 1)
            opened.close()
            await serving.until(lambda: bool(serving.log.named("request_end")))
            (line,) = serving.log.named("request_end")
            assert (line["finish_reason"], line["ttft_ms"], line["output_tokens"]) == ("abort", None, 0)
            assert sink.pieces == []

    asyncio.run(run())


def test_a_refused_request_has_no_end() -> None:
    async def run() -> None:
        async with served() as serving:
            sink = Sink()
            request = make_request("a", 49, 4)
            opened = serving.engine.open("a", request.prompt_token_ids, request.sampling, sink)
            await serving.until(lambda: opened.is_ended)
            opened.close()
            assert [type(error).__name__ for error in sink.errors] == ["ContextLengthError"]
            assert serving.log.named("request_end") == []

    asyncio.run(run())
