"""Tests the engine loop over the fake device: requests and the pieces of their output.

Each test calls the loop iterations itself.
"""

from __future__ import annotations

import pytest

from llm_serving.engine.commands import Abort
from llm_serving.engine.outputs import RequestRefused
from llm_serving.errors import ContextLengthError, QueueFullError
from llm_serving.request import FinishReason
from support.engine_harness import Engine, text_of
from support.fakes import (
    expected_samples,
    expected_tokens,
    make_request,
)


def test_a_request_from_its_arrival_to_its_end() -> None:
    engine = Engine()
    request = engine.request("a", 5, 4, logprobs=True)
    engine.finish()
    output = engine.whole("a")
    samples = expected_samples(request, 64)
    tokens = [sample.token_id for sample in samples]
    assert output.token_ids == tuple(tokens)
    assert output.text == text_of(tokens)
    assert (output.num_prompt_tokens, output.num_output_tokens) == (5, 4)
    assert (output.finish_reason, output.stop_reason, output.error) == (FinishReason.LENGTH, None, None)
    assert [logits.token_id for logits in output.logits] == tokens
    assert [logits.logsumexp for logits in output.logits] == [sample.logsumexp for sample in samples]
    assert [logits.logprob for logits in output.logits] == [sample.logit - sample.logsumexp for sample in samples]
    assert [len(piece.token_ids) for piece in engine.outputs("a")] == [1, 1, 1, 1]
    assert [piece.finished for piece in engine.outputs("a")] == [False, False, False, True]


def test_top_logits_come_with_the_tokens_that_asked() -> None:
    engine = Engine()
    engine.request("a", 5, 2, top_logits=3)
    engine.request("b", 5, 2)
    engine.finish()
    first = engine.whole("a").logits[0]
    assert first.top == ((first.token_id, 0.0), (first.token_id + 1, -1.0), (first.token_id + 2, -2.0))
    assert engine.whole("b").logits == ()


def test_requests_that_the_engine_has_not_taken_count_as_waiting() -> None:
    engine = Engine(max_num_seqs=1, max_waiting_requests=2)
    engine.core.submit(Abort("unknown"))
    for name in "abc":
        assert engine.core.queue_full() is None
        engine.request(name, 5, 4)
    full = engine.core.queue_full()
    assert str(full).startswith("3 requests are waiting and 1 can start; the queue takes 2")
    engine.step()
    assert engine.scheduler.figures.waiting == 2
    assert engine.core.queue_full() is not None
    engine.finish()
    assert engine.core.queue_full("", 2) is None
    assert engine.core.queue_full("", 3) is not None, "the caller expects three requests before this one"


def test_timings_add_up() -> None:
    engine = Engine(max_num_seqs=1)
    engine.request("a", 5, 4)
    engine.request("b", 5, 4)
    engine.finish()
    timings = engine.whole("b").timings
    assert timings is not None
    assert timings.queue > 0.003
    assert timings.prefill > 0
    assert timings.decode == pytest.approx(0.003)
    assert timings.queue + timings.prefill + timings.decode == pytest.approx(timings.e2e)
    assert timings.ttft == pytest.approx(timings.queue + timings.prefill)


def test_all_pieces_of_a_step_are_delivered_together() -> None:
    engine = Engine(prefill_batch_size=3)
    for name in "abc":
        engine.request(name, 5, 3)
    engine.finish()
    assert [len(delivery) for delivery in engine.deliveries] == [3, 3, 3]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_request(ahead: int, include: bool) -> None:
    engine = Engine(decode_steps_ahead=ahead)
    tokens = expected_tokens(make_request("a", 5, 12), 64)
    stop = text_of(tokens[4:6])
    engine.request("a", 5, 12, stop=(stop,), include_stop_str_in_output=include)
    engine.finish()
    output = engine.whole("a")
    assert output.text == text_of(tokens[:6] if include else tokens[:4])
    assert output.token_ids == tuple(tokens[:6])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert len(engine.executor.steps) == 6 + ahead


def test_a_stop_string_that_ends_with_the_last_token_counts() -> None:
    engine = Engine()
    tokens = expected_tokens(make_request("a", 5, 6), 64)
    engine.request("a", 5, 6, stop=(text_of(tokens[4:6]),))
    engine.finish()
    output = engine.whole("a")
    assert output.text == text_of(tokens[:4])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, text_of(tokens[4:6]))
    assert engine.log.named("request_end")[0]["finish_reason"] == "stop"


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    engine = Engine()
    tokens = expected_tokens(make_request("a", 5, 6), 64)
    engine.request("a", 5, 6, stop=(text_of([tokens[5]]) + "never",))
    engine.finish()
    assert engine.whole("a").text == text_of(tokens)


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_a_sequence_is_counted_but_is_no_text(include: bool) -> None:
    engine = Engine()
    tokens = expected_tokens(make_request("a", 5, 12), 64)
    last = tokens.index(tokens[3])
    engine.request("a", 5, 12, stop_token_ids=frozenset({tokens[3]}), include_stop_str_in_output=include)
    engine.finish()
    output = engine.whole("a")
    assert output.token_ids == tuple(tokens[: last + 1])
    assert output.text == text_of(tokens[: last + include])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, tokens[3])


def test_an_abort_frees_its_blocks_within_the_steps_in_flight() -> None:
    engine = Engine()
    engine.request("gone", 5, 50)
    engine.request("stays", 5, 50)
    for _ in range(5):
        engine.step()
    used = engine.scheduler.figures.total_blocks - engine.scheduler.figures.free_blocks
    engine.core.submit(Abort("gone"))
    engine.step()
    assert engine.scheduler.figures.running == 1
    assert engine.outputs("gone")[-1].finish_reason is FinishReason.ABORT
    engine.step()
    assert engine.scheduler.figures.total_blocks - engine.scheduler.figures.free_blocks == used // 2
    engine.finish()
    assert len(engine.whole("stays").token_ids) == 50


def test_a_prefill_of_aborted_requests_is_dropped() -> None:
    engine = Engine()
    engine.executor.hold(True)
    engine.request("a", 40, 8)
    engine.step()
    engine.core.submit(Abort("a"))
    engine.step()
    assert engine.executor.aborted == [1, 0]
    engine.step()
    assert engine.executor.device.ran == []
    assert engine.scheduler.is_idle
    assert engine.metrics.steps == []


def test_aborting_twice_or_too_late_does_nothing() -> None:
    engine = Engine()
    engine.request("a", 5, 2)
    engine.finish()
    engine.core.submit(Abort("a"))
    engine.core.submit(Abort("nobody"))
    engine.step()
    assert len(engine.outputs("a")) == 2


def test_refusals_are_delivered() -> None:
    engine = Engine(max_num_seqs=1, max_waiting_requests=0)
    engine.request("long", 60, 2)
    engine.request("a", 5, 2)
    engine.request("b", 5, 2)
    engine.finish()
    refused = [output for output in engine.deliveries[0] if isinstance(output, RequestRefused)]
    assert [output.request_id for output in refused] == ["long", "b"]
    assert [type(output.error) for output in refused] == [ContextLengthError, QueueFullError]
    assert engine.metrics.refusals == ["context_length_exceeded", "queue_full"]
    assert len(engine.whole("a").token_ids) == 2
