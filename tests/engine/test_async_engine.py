"""Tests AsyncEngine over the fake device: its thread and its asyncio methods."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from llm_serving.cluster.standby import Standby
from llm_serving.engine.outputs import merge_outputs
from llm_serving.errors import AgentLostError, ContextLengthError, ModelUnavailableError, QueueFullError, RequestError
from llm_serving.executor.base import AgentLost, AgentReady
from llm_serving.request import FinishReason, RequestOutput
from llm_serving.telemetry.status_metrics import StatusCollector
from support.fakes import (
    END_TOKEN,
    VOCABULARY,
    expected_tokens,
    make_request,
)
from support.recorded import RecordProperty
from support.served_engine import served


def test_concurrent_requests_get_the_same_as_single_ones() -> None:
    async def run() -> None:
        async with served(num_blocks=40, max_waiting_requests=1000) as serving:
            requests = [make_request(f"r{index}", 1 + index % 30, 12, ignore_eos=False) for index in range(60)]
            outputs = await asyncio.gather(*(serving.whole(request) for request in requests))
            for request, output in zip(requests, outputs, strict=True):
                request.end_token_ids = frozenset({END_TOKEN})
                assert output.token_ids == tuple(expected_tokens(request, 64))
                assert output.num_output_tokens == len(output.token_ids)
            assert serving.log.named("error") == []

    asyncio.run(run())


def test_losses_and_departures_do_not_change_the_others(record_property: RecordProperty) -> None:
    async def run() -> None:
        async with served(num_blocks=60, decode_steps_ahead=2) as serving:
            requests = [make_request(f"r{index}", 1 + index % 20, 30) for index in range(12)]
            tasks = [asyncio.create_task(serving.whole(request)) for request in requests]
            for index, task in enumerate(tasks):
                await asyncio.sleep(0.002)
                # A failed self-check is no fault of a request. After two other losses of its agent, a request would end
                # with an error.
                if index % 4 == 0:
                    serving.executor.lose_agent(loss=AgentLost("wrong bits", failed_check="row"))
                if index % 3 == 0:
                    task.cancel()
            outputs = await asyncio.gather(*tasks, return_exceptions=True)
            whole = [
                (output, tuple(expected_tokens(request, 64)))
                for request, output in zip(requests, outputs, strict=True)
                if isinstance(output, RequestOutput)
            ]
            wrong = sum(output.token_ids != expected for output, expected in whole)
            record_property("wrong_texts", f"{wrong} of {len(whole)}")
            for output, expected in whole:
                assert (output.finish_reason, output.error) == (FinishReason.LENGTH, None)
                assert output.token_ids == expected
            assert serving.log.named("error") == []
            assert len(whole) >= 8

    asyncio.run(run())


def test_leaving_the_stream_aborts_the_request() -> None:
    async def run() -> None:
        async with served(max_model_len=2000, num_blocks=600) as serving:
            serving.executor.step_seconds = 0.001
            async with aclosing(serving.pieces(make_request("a", 5, 1900))) as pieces:
                async for _ in pieces:
                    break
            await serving.until(serving.is_idle)
            (end,) = serving.log.named("request_end")
            assert end["finish_reason"] == "abort"
            assert end["output_tokens"] < 1000  # type: ignore[operator]

    asyncio.run(run())


def test_a_cancelled_reader_aborts_its_request_while_it_waits() -> None:
    async def run() -> None:
        async with served() as serving:
            serving.executor.hold(True)
            task = asyncio.create_task(serving.whole(make_request("a", 5, 50)))
            await serving.until(lambda: serving.engine.status().figures.running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await serving.until(
                lambda: serving.engine.status().figures.free_blocks == serving.engine.status().figures.total_blocks
            )

    asyncio.run(run())


def test_an_id_just_left_can_be_used_again_and_gets_its_own_pieces(record_property: RecordProperty) -> None:
    async def run() -> None:
        async with served(max_model_len=2000, num_blocks=600) as serving:
            answered = 0
            for _ in range(20):
                async with aclosing(serving.pieces(make_request("same", 5, 1000))) as pieces:
                    async for _ in pieces:
                        answered += 1
                        break
            output = await serving.whole(make_request("same", 3, 4))
            expected = tuple(expected_tokens(make_request("same", 3, 4), 64))
            record_property("wrong_responses", f"{20 - answered + (output.token_ids != expected)} of 21")
            assert (answered, output.token_ids) == (20, expected)

    asyncio.run(run())


def test_an_id_in_use_is_refused_and_its_owner_is_not_disturbed(record_property: RecordProperty) -> None:
    async def run() -> None:
        async with served() as serving:
            serving.executor.hold(True)
            owner = asyncio.create_task(serving.whole(make_request("a", 5, 20)))
            await serving.until(lambda: serving.engine.status().figures.running == 1)
            with pytest.raises(RequestError, match="'a' is being served"):
                await serving.whole(make_request("a", 5, 20))
            serving.executor.hold(False)
            token_ids, expected = (await owner).token_ids, tuple(expected_tokens(make_request("a", 5, 20), 64))
            record_property("wrong_responses", f"{token_ids != expected:d} of 1")
            assert token_ids == expected

    asyncio.run(run())


def test_refusals_are_raised_before_the_first_piece() -> None:
    async def run() -> None:
        async with served(max_num_seqs=1, max_waiting_requests=0) as serving:
            with pytest.raises(ContextLengthError):
                await serving.whole(make_request("long", 49, 5))
            serving.executor.hold(True)
            running = asyncio.create_task(serving.whole(make_request("a", 5, 5)))
            await serving.until(lambda: serving.engine.status().figures.running == 1)
            with pytest.raises(QueueFullError):
                await serving.whole(make_request("b", 5, 5))
            serving.executor.hold(False)
            await running

    asyncio.run(run())


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(wrong: int, record_property: RecordProperty) -> None:
    """The refusal changes no token of a request that runs at the same time."""

    async def run() -> None:
        async with served() as serving:
            serving.executor.hold(True)
            neighbour = make_request("b", 5, 20)
            running = asyncio.create_task(serving.whole(neighbour))
            await serving.until(lambda: serving.engine.status().figures.running == 1)
            with pytest.raises(RequestError, match=f"token id {wrong} in the prompt is not in the vocabulary"):
                await serving.whole(make_request("a", [5, wrong, 6]))
            serving.executor.hold(False)
            token_ids, expected = (await running).token_ids, tuple(expected_tokens(neighbour, 64))
            record_property("changed_neighbours", f"{token_ids != expected:d} of 1")
            assert token_ids == expected

    asyncio.run(run())


def test_abort_by_id_ends_the_stream() -> None:
    async def run() -> None:
        async with served(max_model_len=2000, num_blocks=600) as serving:
            serving.executor.step_seconds = 0.001
            pieces = []
            async for piece in serving.pieces(make_request("a", 5, 1900)):
                pieces.append(piece)
                serving.engine.abort("a")
            assert pieces[-1].finish_reason is FinishReason.ABORT

    asyncio.run(run())


def test_a_slow_reader_gets_few_large_pieces(record_property: RecordProperty) -> None:
    async def run() -> None:
        async with served(max_model_len=500, num_blocks=200) as serving:
            request = make_request("a", 5, 400, logprobs=True)
            pieces = []
            async for piece in serving.pieces(request):
                if not pieces:
                    await serving.until(serving.is_idle)
                    await asyncio.sleep(0.01)
                    held = len(serving.engine._open["a"].sink._pieces)
                    record_property("held_pieces", held)
                    assert held < 32
                pieces.append(piece)
            assert len(pieces) <= 2, "one, if the engine was done before the reader looked"
            assert merge_outputs(pieces).token_ids == tuple(expected_tokens(request, 500))
            assert len(merge_outputs(pieces).logits) == 400

    asyncio.run(run())


def test_a_probe_is_true_only_when_the_agents_answer() -> None:
    async def run() -> None:
        async with served() as serving:
            assert await serving.engine.probe(1.0) is True
            serving.executor.request_status = lambda: None  # type: ignore[method-assign]
            assert await serving.engine.probe(0.01) is False
            assert serving.engine._questions._probes == []

    asyncio.run(run())


def test_an_idle_engine_does_not_poll() -> None:
    async def run() -> None:
        async with served() as serving:
            await serving.whole(make_request("a"))
            await serving.until(serving.is_idle)
            await asyncio.sleep(0.05)
            polls = serving.executor.polls
            await asyncio.sleep(0.2)
            assert serving.executor.polls == polls

    asyncio.run(run())


def test_an_agent_given_up_ends_streams_with_an_error_and_refuses_new_ones() -> None:
    async def run() -> None:
        async with served() as serving:
            serving.executor.hold(True)
            task = asyncio.create_task(serving.whole(make_request("a", 5, 50)))
            await serving.until(lambda: serving.engine.status().figures.running == 1)
            serving.executor.push(AgentLost("gone", final=True))
            output = await task
            assert output.finish_reason is FinishReason.ERROR
            assert "gone" in str(output.error)
            with pytest.raises(AgentLostError, match="gone"):
                await serving.whole(make_request("b"))
            assert serving.engine.status().state == "stopped"
            assert "gone" in serving.engine.stop_reason

    asyncio.run(run())


def test_stopping_ends_every_stream() -> None:
    async def run() -> None:
        async with served() as serving:
            serving.executor.hold(True)
            tasks = [asyncio.create_task(serving.whole(make_request(name, 5, 50))) for name in "abc"]
            await serving.until(lambda: serving.engine.status().figures.running == 3)
            await serving.engine.stop()
            outputs = await asyncio.gather(*tasks)
            assert {output.error for output in outputs} == {"the server is shutting down"}
            with pytest.raises(AgentLostError, match="shutting down"):
                await serving.whole(make_request("late"))

    asyncio.run(run())


def test_a_request_that_cannot_wait_for_a_node_is_refused_and_wakes_nodes() -> None:
    async def run() -> None:
        standby = Standby(60.0)
        standby.wake_s = 5.0
        async with served(standby=standby) as serving:
            with pytest.raises(ModelUnavailableError, match=r"about 5.0 s; the request may wait 0.1 s"):
                serving.engine.check_wait(0.1)
            await serving.until(lambda: standby.is_wanted)
            status = serving.engine.status()
            assert (status.waiting, status.figures.waiting) == (1, 0), "the queue does not have the refused request"
            metrics = StatusCollector()
            metrics.status = lambda: status
            [waiting] = [one for one in metrics.collect() if one.name == "llm_serving_requests_waiting"]
            assert waiting.samples[0].value == 1
            serving.executor.push(AgentReady({}))
            await serving.until(lambda: standby.is_ready)
            serving.engine.check_wait(0.1)

    asyncio.run(run())
