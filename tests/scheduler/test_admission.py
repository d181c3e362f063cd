"""Tests the admission of requests, and refusals that state the calculation of the limit."""

from __future__ import annotations

import pytest

from llm_serving.errors import ContextLengthError, QueueFullError, RequestError
from llm_serving.request import FinishReason
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits, make_request
from support.recorded import RecordProperty
from support.simulation import Simulation


def test_a_request_that_never_fits_the_cache_is_refused_with_the_arithmetic() -> None:
    scheduler = Scheduler(make_limits(num_blocks=6, block_size=4, max_model_len=64))
    with pytest.raises(ContextLengthError) as refusal:
        scheduler.add_request(make_request("big", 10, 12))
    assert str(refusal.value) == (
        "a prompt of 10 tokens and up to 12 output tokens need ceil((10 + 12 - 1) / 4) = 6 blocks of the KV cache."
        " The KV cache has 5 blocks (pa_config.num_blocks 6 less the null block) for 20 tokens. Shorten the prompt or"
        " ask for fewer tokens."
    )
    assert (refusal.value.status, refusal.value.param) == (400, "max_tokens")
    assert scheduler.is_idle


def test_the_last_token_needs_no_kv_position() -> None:
    simulation = Simulation(make_limits(num_blocks=6, block_size=4, max_model_len=64))
    simulation.add(make_request("fits", 10, 11))
    simulation.finish()
    assert len(simulation.streams["fits"]) == 11


def test_a_request_near_the_size_of_the_pool_is_refused_or_served(record_property: RecordProperty) -> None:
    """The pool has 5 blocks of 4 tokens. A request is refused if and only if it needs more than these 20 tokens."""
    unserved, requests = 0, [(prompt, output) for prompt in range(11, 30) for output in range(1, 12)]
    for prompt, output in requests:
        simulation = Simulation(make_limits(num_blocks=6, block_size=4, max_model_len=64))
        try:
            simulation.add(make_request("a", prompt, output))
        except ContextLengthError:
            unserved += prompt + output - 1 <= 20
        else:
            simulation.finish()
            unserved += simulation.ended != {"a": FinishReason.LENGTH} or prompt + output - 1 > 20
    record_property("unserved", f"{unserved} of {len(requests)}")
    assert unserved == 0


def test_a_request_may_need_the_whole_pool() -> None:
    simulation = Simulation(make_limits(num_blocks=41, block_size=1, max_model_len=41, max_prompt_len=40))
    simulation.add(make_request("all", 39, 2), make_request("too", 39, 2))
    simulation.finish()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (0, "the prompt has no tokens"),
        (49, "the prompt has 49 tokens; the maximum is 48 tokens (model_config.seq_length)"),
    ],
)
def test_prompt_lengths_are_limited(prompt: int, message: str) -> None:
    scheduler = Scheduler(make_limits(max_prompt_len=48))
    with pytest.raises(ContextLengthError) as refusal:
        scheduler.add_request(make_request("wrong", prompt))
    assert message in str(refusal.value)
    assert refusal.value.param == "prompt"


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    scheduler = Scheduler(make_limits(max_prompt_len=64, max_model_len=64))
    with pytest.raises(ContextLengthError, match="64 tokens and the context is 64 tokens, which leaves no space"):
        scheduler.add_request(make_request("long", 64))


def test_the_output_ends_at_the_end_of_the_context() -> None:
    simulation = Simulation(make_limits(max_prompt_len=64, max_model_len=64))
    simulation.add(make_request("long", 60, 100))
    simulation.finish()
    assert len(simulation.streams["long"]) == 4
    assert simulation.ended["long"] is FinishReason.LENGTH


def test_max_tokens_is_at_least_one() -> None:
    with pytest.raises(ContextLengthError, match="max_tokens is 0; it must be at least 1"):
        Scheduler(make_limits()).add_request(make_request("none", 5, 0))


def test_the_limit_on_requests_does_not_count_those_that_can_start() -> None:
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_waiting_requests=2))
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name))
    with pytest.raises(QueueFullError) as refusal:
        scheduler.add_request(make_request("d"))
    assert "3 requests are waiting and 1 can start; the queue takes 2" in str(refusal.value)
    assert refusal.value.status == 429
    assert scheduler.schedule(0.0) is not None
    assert (scheduler.figures.running, scheduler.figures.waiting) == (1, 2)
    with pytest.raises(QueueFullError, match="2 requests are waiting and 0 can start"):
        scheduler.add_request(make_request("d"))


def test_the_queue_has_a_limit_on_tokens() -> None:
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_waiting_tokens=20))
    scheduler.add_request(make_request("a", 15))
    scheduler.add_request(make_request("b", 5))
    with pytest.raises(QueueFullError, match=r"with 20 tokens are waiting, this one has 1; the queue takes 20 tokens"):
        scheduler.add_request(make_request("c", 1))


def test_an_id_is_in_use_until_its_request_ends() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request("a"))
    with pytest.raises(RequestError, match="a request with the id 'a' is being served"):
        simulation.scheduler.add_request(make_request("a"))
    simulation.finish()
    simulation.scheduler.add_request(make_request("a"))


def test_a_refused_request_changes_nothing(record_property: RecordProperty) -> None:
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_waiting_requests=0))
    scheduler.add_request(make_request("a"))
    with pytest.raises(QueueFullError):
        scheduler.add_request(make_request("b"))
    scheduler.finish_request("a", FinishReason.ABORT, 0.0)
    record_property("admitted_parts", f"{scheduler.figures.waiting + scheduler.figures.running} of 1")
    assert scheduler.is_idle
    scheduler.add_request(make_request("b"))


@pytest.mark.parametrize(
    "changes", [{"decode_steps_ahead": 4}, {"decode_steps_ahead": -1}, {"max_num_seqs": 0}, {"prefill_batch_size": 0}]
)
def test_impossible_limits_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        make_limits(**changes)


def test_limits_compare_by_value() -> None:
    assert make_limits() == SchedulerLimits(33, 4, 64, 48, 8, 64, 2, 8)


def test_the_admission_limit_does_not_count_batch_rows_without_blocks() -> None:
    """Each request needs 3 of 15 blocks, and one more block is kept free for each running request.

    Many batch rows are free, but they have no blocks, so the queue counts as full.
    """
    limits = make_limits(
        max_num_seqs=16, max_waiting_requests=2, num_blocks=16, block_size=4, prefill_batch_size=8, decode_batch_size=16
    )
    simulation = Simulation(limits)
    simulation.add(*(make_request(f"r{index}", 12, 8) for index in range(6)))
    simulation.schedule()
    scheduler = simulation.scheduler
    assert scheduler.figures.waiting >= 2
    full = scheduler.queue_full()
    assert full is not None
    assert "can start; the queue takes 2" in str(full)
    with pytest.raises(QueueFullError):
        scheduler.add_request(make_request("more"))
    simulation.finish()
    assert scheduler.queue_full() is None
