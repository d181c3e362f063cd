"""Tests the receipts of requests: their parts add up during and after the request, and their memory is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llm_serving.engine.commands import Add
from llm_serving.engine.receipts import ReceiptBook, receipt_of, request_timings
from llm_serving.engine.request_log import RequestLog, met_objectives
from llm_serving.errors import DeadlineExceededError
from llm_serving.request import PARTS, FinishReason, Request, RequestOutput, RequestTimings, SchedulingParams
from llm_serving.telemetry.receipt import BlockReason, Phase, Receipt
from support.engine_harness import Engine
from support.fakes import RecordingLog, RecordingMetrics, make_request
from support.served_engine import Served, Sink, served


def eventful_request() -> Request:
    """Returns a request that has been in every phase.

    The time in each phase is a different power of two in milliseconds.
    """
    request = make_request("r", 10, arrival=100.0)
    receipt = request.receipt = Receipt(100.001)
    receipt.blocked(BlockReason.ROWS, ["a"], 100.001)
    receipt.blocked(BlockReason.BLOCKS, ["b", "a"], 100.0015)
    receipt.enter(Phase.PREFILL, 100.003)
    receipt.enter(Phase.DECODE, 100.007)
    receipt.enter(Phase.PREEMPTED, 100.011)
    receipt.enter(Phase.DECODE, 100.027)
    receipt.enter(Phase.SWAPPED, 100.031)
    receipt.enter(Phase.DECODE, 100.063)
    request.first_scheduled_time, request.first_token_time = 100.003, 100.007
    request.num_preemptions, request.num_cached_tokens, receipt.chunks = 1, 8, 2
    request.output_token_ids += [1, 2, 3]
    return request


def ended(request: Request, at: float, reason: FinishReason = FinishReason.STOP) -> Request:
    request.finish_reason, request.finish_time = reason, at
    request.receipt.enter(Phase.DONE, at)
    return request


def test_the_timings_of_a_request() -> None:
    timings = request_timings(ended(eventful_request(), 100.064))
    assert timings.parts == {
        "tokenise": 0.001, "queue": 0.002, "prefill": 0.004, "decode": 0.009, "preempted": 0.016, "swapped": 0.032,
        "restarted": 0.0, "delivery": 0.0,
    }  # fmt: skip
    assert (timings.e2e, timings.ttft) == (0.064, pytest.approx(0.007))
    assert timings.tpot == pytest.approx((100.064 - 100.007) / 2)
    assert (timings.num_preemptions, timings.num_swaps, timings.num_chunks, timings.num_cached_tokens) == (1, 1, 2, 8)
    assert [(one.reason, one.times, one.seconds) for one in timings.blocked] == [
        (BlockReason.BLOCKS, 1, 0.0015),
        (BlockReason.ROWS, 1, 0.0005),
    ]
    assert timings.blocked_by == ("a", "b")


def test_a_receipt_while_it_runs_and_while_it_is_delivered() -> None:
    request = eventful_request()
    live = receipt_of(request, 100.163)
    assert (live.state, live.finish_reason, live.num_output_tokens) == ("decode", None, 3)
    assert (live.timings.decode, live.timings.e2e, live.timings.tpot) == (0.108, 0.163, None)
    ended(request, 100.064)
    late = receipt_of(request, 101.064)
    assert (late.state, late.timings.delivery, late.timings.e2e) == ("delivery", 1.0, 1.064)
    for receipt in (live, late):
        content = receipt.to_json()
        assert round(sum(content["parts_ms"].values()), 3) == content["e2e_ms"]
        assert list(content["parts_ms"]) == list(PARTS)


def test_a_request_that_has_not_ended_has_no_final_timings() -> None:
    with pytest.raises(AssertionError, match="r has not ended"):
        request_timings(eventful_request())


def test_the_book_lists_the_newest_first() -> None:
    book = ReceiptBook(3)
    for number in range(5):
        book.add(receipt_of(ended(make_request(f"r{number}", 1), 1.0), 1.0))
    assert [one.request_id for one in book.latest(2)] == ["r4", "r3"]
    assert [one.request_id for one in book.latest(9)] == ["r4", "r3", "r2"]
    assert book.latest(0) == []


def test_the_receipt_book_removes_the_oldest_receipt() -> None:
    book = ReceiptBook(size=3)
    for name in ("a", "b", "c", "a", "d"):
        book.add(receipt_of(make_request(name), 1.0))
    assert [book.get(name) is not None for name in "abcd"] == [True, False, True, True]
    assert len(book._receipts) == 3


def outcome(reason: FinishReason, ttft: float | None, tpot: float | None, **terms: Any) -> dict[str, bool]:
    request = make_request("r", arrival=100.0)
    for name, value in terms.items():
        setattr(request, name, value)
    request.finish_reason, request.finish_time = reason, 101.0
    return dict(met_objectives(request, RequestTimings(0.0, 0.0, 0.0, 0.0, ttft, tpot=tpot)))


BOTH = {"ttft_objective": 0.5, "tbt_objective": 0.1}


@pytest.mark.parametrize(
    ("met", "reason", "ttft", "tpot", "terms"),
    [
        ({}, FinishReason.STOP, 0.1, 0.1, {}),
        ({"ttft": True, "both": True}, FinishReason.STOP, 0.5, 9.0, {"ttft_objective": 0.5}),
        ({"tbt": True, "both": True}, FinishReason.LENGTH, 9.0, 0.1, {"tbt_objective": 0.1}),
        ({"ttft": True, "tbt": True, "both": True}, FinishReason.STOP, 0.5, 0.1, BOTH),
        ({"ttft": False, "tbt": True, "both": False}, FinishReason.STOP, 0.51, 0.1, BOTH),
        ({"ttft": True, "tbt": False, "both": False}, FinishReason.STOP, 0.5, 0.11, BOTH),
        ({"ttft": True, "tbt": True, "both": True}, FinishReason.STOP, 0.5, None, BOTH),
        ({"ttft": False, "tbt": True, "both": False}, FinishReason.STOP, None, None, BOTH),
        ({"ttft": False, "tbt": False, "both": False}, FinishReason.ERROR, 0.1, 0.1, BOTH),
        ({}, FinishReason.ABORT, 0.1, 0.1, BOTH),
        ({}, FinishReason.ABORT, 0.1, 0.1, BOTH | {"deadline": 100.5, "first_token_time": 100.2}),
        ({}, FinishReason.ABORT, None, None, BOTH | {"deadline": 101.5}),
        ({"ttft": False, "tbt": False, "both": False}, FinishReason.ABORT, None, None, BOTH | {"deadline": 100.5}),
    ],
)
def test_objectives_are_met_or_missed(
    met: dict[str, bool], reason: FinishReason, ttft: float | None, tpot: float | None, terms: dict[str, Any]
) -> None:
    assert outcome(reason, ttft, tpot, **terms) == met


def test_the_log_event_of_the_end_of_a_request() -> None:
    log, metrics = RecordingLog(), RecordingMetrics()
    request = ended(eventful_request(), 100.064)
    request.tenant, request.priority, request.ttft_objective = "0011223344556677", -1, 0.001
    timings = request_timings(request)
    output = RequestOutput("r", "", (), (), 10, 3, FinishReason.STOP, timings=timings)
    RequestLog(log, metrics).request_end(output, timings, request)
    assert log.named("request_end") == [
        {
            "request_id": "r", "prompt_tokens": 10, "cached_tokens": 8, "output_tokens": 3, "total_tokens": 13,
            "finish_reason": "stop", "replica": 0, "tokenise_ms": 1.0, "queue_ms": 2.0, "prefill_ms": 4.0,
            "preempted_ms": 16.0, "swapped_ms": 32.0, "restarted_ms": 0.0, "delivery_ms": 0.0, "e2e_ms": 64.0,
            "decode_ms": 9.0, "ttft_ms": 7.0, "tpot_ms": 28.5,
            "preemptions": 1, "swaps": 1, "prefill_chunks": 2, "blocked_ms": {"blocks": 1.5, "rows": 0.5},
            "blocked_times": {"blocks": 1, "rows": 1}, "blocked_by": ["a", "b"], "tenant": "0011223344556677",
            "priority": -1, "objectives_met": {"ttft": False, "both": False},
        }
    ]  # fmt: skip
    assert metrics.met == [{"ttft": False, "both": False}]


def test_a_request_that_waits_past_its_deadline_gets_its_last_piece() -> None:
    """The request ends at its deadline, without computed tokens and without an abort. The running request continues."""
    engine = Engine(max_num_seqs=1)
    engine.request("runs", 5, 20)
    engine.step()
    late = make_request("late", 5, 9, arrival=engine.now)
    late.deadline, late.ttft_objective = engine.now + 0.005, 1.0
    engine.asked["late"] = late
    engine.core.submit(Add(late))
    engine.finish()
    output = engine.whole("late")
    assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, ())
    assert output.error is not None
    assert "deadline" in output.error
    assert output.timings is not None
    assert output.timings.queue == output.timings.e2e >= 0.005
    assert engine.metrics.met == [{"ttft": False, "both": False}, {}]
    assert engine.whole("runs").finish_reason is FinishReason.LENGTH
    assert [blocked.reason for blocked in output.timings.blocked] == [BlockReason.ROWS]
    assert output.timings.blocked_by == ("runs",)


def open_one(serving: Served, sink: Sink, name: str = "a", **options: Any) -> Any:
    request = make_request(name, 5, 4)
    return serving.engine.open(name, request.prompt_token_ids, request.sampling, sink, **options)


def test_a_receipt_by_id_live_and_afterwards() -> None:
    async def run() -> None:
        async with served() as serving:
            engine = serving.engine
            serving.executor.hold(True)
            scheduling = SchedulingParams(priority=3, tenant="t")
            opened = open_one(serving, Sink(), arrival_time=engine._clock() - 1.0, scheduling=scheduling)
            await serving.until(lambda: engine.status().figures.running == 1)
            live = engine.receipt("a")
            assert live is not None
            assert (live.state, live.tenant, live.priority) == ("prefill", "t", 3)
            assert [one.state for one in engine.receipts(9)] == ["prefill"]
            assert 1.0 <= live.timings.tokenise <= live.timings.e2e
            serving.executor.hold(False)
            await serving.until(lambda: opened.is_ended)
            delivering = engine.receipt("a")
            assert delivering is not None
            assert (delivering.state, delivering.finish_reason) == ("delivery", "length")
            opened.close(engine._clock())
            done = engine.receipt("a")
            assert done is not None
            assert (done.state, done.num_output_tokens) == ("done", 4)
            (line,) = serving.log.named("request_end")
            assert {f"{name}_ms": value for name, value in done.to_json()["parts_ms"].items()}.items() <= line.items()
            assert engine.receipt("b") is None
            assert [one.request_id for one in engine.receipts(9)] == ["a"]

    asyncio.run(run())


def test_scheduling_params_reach_the_scheduler() -> None:
    async def run() -> None:
        async with served() as serving:
            scheduling = SchedulingParams(3, "t", b"salt", 0.5, 0.25, 60.0)
            opened = open_one(serving, Sink(), arrival_time=serving.engine._clock() - 1.0, scheduling=scheduling)
            request = opened.request
            assert (request.priority, request.tenant, request.cache_salt) == (3, "t", b"salt")
            assert (request.ttft_objective, request.tbt_objective) == (0.5, 0.25)
            assert request.deadline == request.arrival_time + 60.0
            await serving.until(lambda: opened.is_ended)
            opened.close()

    asyncio.run(run())


def test_objectives_are_the_configs_unless_the_request_has_its_own() -> None:
    async def run() -> None:
        async with served() as serving:
            opened = open_one(serving, Sink(), scheduling=SchedulingParams(tbt_objective=0.25))
            assert (opened.request.ttft_objective, opened.request.tbt_objective) == (0.5, 0.25)
            await serving.until(lambda: opened.is_ended)
            opened.close()
            (line,) = serving.log.named("request_end")
            assert set(line["objectives_met"]) == {"ttft", "tbt", "both"}  # type: ignore[call-overload]

    asyncio.run(run())


def test_a_deadline_that_has_passed_is_refused() -> None:
    async def run() -> None:
        async with served() as serving:
            arrival = serving.engine._clock() - 0.5
            with pytest.raises(DeadlineExceededError, match=r"was 250\.0 ms after .* took 5\d\d\.\d+ ms") as raised:
                open_one(serving, Sink(), arrival_time=arrival, scheduling=SchedulingParams(deadline=0.25))
            assert (raised.value.status, raised.value.param) == (504, "deadline_ms")
            assert serving.is_idle()

    asyncio.run(run())


def test_a_full_queue_is_known_without_asking_the_engines_thread() -> None:
    async def run() -> None:
        async with served(max_waiting_requests=3, max_num_seqs=2) as serving:
            engine = serving.engine
            serving.executor.hold(True)
            opened = [open_one(serving, Sink(), name) for name in "abcd"]
            assert engine.queue_full() is None
            opened.append(open_one(serving, Sink(), "e"))
            await serving.until(lambda: engine.status().figures.running == 2 and engine.queue_full() is not None)
            full = engine.queue_full()
            assert "3 requests are waiting and 0 can start; the queue takes 3" in str(full)
            sink = Sink()
            opened.append(open_one(serving, sink, "f"))
            await serving.until(lambda: bool(sink.errors))
            assert [type(error) for error in sink.errors] == [type(full)], "the engine says the same"
            serving.executor.hold(False)
            await serving.until(lambda: all(one.is_ended for one in opened))
            assert engine.queue_full() is None
            for one in opened:
                one.close()

    asyncio.run(run())
