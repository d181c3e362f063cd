"""Who may start beside whom, in each batching mode."""

from __future__ import annotations

import pytest

from llm_serving.scheduler.limits import BatchingStrategy
from support.fakes import make_limits, make_request
from support.simulation import Simulation, names, order

NONE, STATIC, DYNAMIC = BatchingStrategy.NONE, BatchingStrategy.STATIC, BatchingStrategy.DYNAMIC


def test_without_batching_the_next_request_starts_when_the_one_before_has_ended() -> None:
    simulation = Simulation(make_limits(batching=NONE, decode_steps_ahead=0))
    simulation.add(make_request("a", 5, 3), make_request("b", 5, 2), make_request("c", 5, 1))
    simulation.finish()
    assert order(simulation) == ["p:a", "d:a", "d:a", "p:b", "d:b", "p:c"]


def test_a_static_batch_is_what_waits_when_the_device_is_free_and_nobody_joins_it() -> None:
    simulation = Simulation(make_limits(batching=STATIC, decode_steps_ahead=0, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 4), make_request("b", 5, 2))
    simulation.step()
    simulation.add(make_request("c", 5, 2), make_request("d", 5, 1))
    simulation.finish()
    assert order(simulation) == ["p:ab", "d:ab", "d:a", "d:a", "p:cd", "d:c"]


def test_a_static_batch_takes_no_more_than_its_size_however_many_steps_its_prompts_need() -> None:
    simulation = Simulation(make_limits(batching=STATIC, batch_size=3, decode_steps_ahead=0, prefill_batch_size=2))
    simulation.add(*(make_request(name, 5, 2) for name in "abcde"))
    simulation.finish()
    assert order(simulation) == ["p:ab", "p:c", "d:abc", "p:de", "d:de"]


def test_who_comes_while_a_batch_is_being_prefilled_is_in_the_next_one() -> None:
    simulation = Simulation(make_limits(batching=STATIC, decode_steps_ahead=0, prefill_batch_size=1))
    simulation.add(make_request("a", 5, 2), make_request("b", 5, 2), make_request("c", 5, 2))
    simulation.schedule()
    simulation.add(make_request("late", 5, 2))
    simulation.finish()
    assert order(simulation) == ["p:a", "p:b", "p:c", "d:abc", "p:late", "d:late"]


def test_a_static_batch_is_as_large_as_the_cache_lets_it_be() -> None:
    simulation = Simulation(
        make_limits(batching=STATIC, decode_steps_ahead=0, prefill_batch_size=4, num_blocks=17, page_attention=False)
    )
    simulation.add(*(make_request(name, 17, 12) for name in "abc"))
    simulation.finish()
    prefills = [step for step in order(simulation) if step.startswith("p")]
    assert prefills == ["p:ab", "p:c"]
    assert order(simulation).index("p:c") == 12


def test_a_dynamic_batch_leaves_when_it_is_full() -> None:
    simulation = Simulation(make_limits(batching=DYNAMIC, batch_size=2, batch_waiting_time=5.0, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 2))
    assert simulation.schedule() == []
    assert simulation.scheduler.next_wakeup(0.0) == 5.0
    simulation.add(make_request("b", 5, 2), make_request("c", 5, 2))
    assert names(simulation.schedule()[0]) == "p:ab"
    simulation.finish()
    assert simulation.now == 5.0


def test_a_dynamic_batch_leaves_when_its_first_request_has_waited_long_enough() -> None:
    simulation = Simulation(make_limits(batching=DYNAMIC, batch_size=8, batch_waiting_time=0.5, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 2, arrival=0.0), make_request("b", 5, 2, arrival=0.4))
    simulation.now = 0.49
    assert simulation.schedule() == []
    simulation.now = 0.5
    assert names(simulation.schedule()[0]) == "p:ab"
    simulation.finish()


def test_the_next_dynamic_batch_waits_until_the_one_before_has_ended() -> None:
    simulation = Simulation(
        make_limits(batching=DYNAMIC, batch_size=2, batch_waiting_time=0.5, prefill_batch_size=4, decode_steps_ahead=0)
    )
    simulation.add(*(make_request(name, 5, tokens) for name, tokens in zip("abcd", (4, 2, 1, 1), strict=True)))
    simulation.finish()
    assert order(simulation) == ["p:ab", "d:ab", "d:a", "d:a", "p:cd"]


@pytest.mark.parametrize("batching", BatchingStrategy)
def test_an_aborted_batch_makes_room_for_the_next(batching: BatchingStrategy) -> None:
    simulation = Simulation(make_limits(batching=batching, batch_size=2, prefill_batch_size=2))
    simulation.add(*(make_request(name, 5, 20) for name in "abcd"))
    simulation.step()
    for name in "ab":
        simulation.end(name)
    simulation.finish()
    assert len(simulation.streams["d"]) == 20


@pytest.mark.parametrize("batching", [STATIC, DYNAMIC])
def test_a_preempted_request_comes_back_into_its_batch(batching: BatchingStrategy) -> None:
    simulation = Simulation(make_limits(batching=batching, num_blocks=9, max_model_len=33, prefill_batch_size=2))
    old, young = make_request("old", 9, 20), make_request("young", 9, 20)
    simulation.add(old, young)
    simulation.step()
    simulation.add(make_request("next", 5, 2))
    simulation.finish()
    assert young.num_preemptions > 0
    last = max(step.seq for step in simulation.steps if young in step.requests)
    first = min(step.seq for step in simulation.steps if step.requests[0].request_id == "next")
    assert last < first


def test_sequences_in_one_piece_hold_consecutive_blocks_for_their_longest_answer() -> None:
    simulation = Simulation(make_limits(page_attention=False, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 8), make_request("b", 9, 8))
    (step, *_) = simulation.schedule()
    assert step.block_tables == [[1, 2, 3], [4, 5, 6, 7]]
    assert simulation.scheduler.figures.kv_waste == pytest.approx(1 - (6 + 10) / 28)
    simulation.finish()


def test_the_waste_of_paged_blocks_is_in_the_last_block_alone() -> None:
    simulation = Simulation(make_limits(prefill_batch_size=4, decode_steps_ahead=0))
    simulation.add(make_request("a", 5, 8), make_request("b", 8, 8))
    simulation.schedule()
    assert simulation.scheduler.figures.kv_waste == pytest.approx(3 / 16)
    simulation.finish()
    assert simulation.scheduler.figures.kv_waste == 0.0
