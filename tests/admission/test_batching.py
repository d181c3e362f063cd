"""Tests which requests may start while others run, in each batching mode."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from llm_serving.scheduler.limits import BatchingStrategy
from support.fakes import make_limits, make_request
from support.simulation import Simulation, names, order

NONE, STATIC, DYNAMIC = BatchingStrategy.NONE, BatchingStrategy.STATIC, BatchingStrategy.DYNAMIC


def test_without_batching_one_request_runs_at_a_time() -> None:
    simulation = Simulation(make_limits(batching=NONE, decode_steps_ahead=0))
    simulation.add(make_request("a", 5, 3), make_request("b", 5, 2), make_request("c", 5, 1))
    simulation.finish()
    assert order(simulation) == ["p:a", "d:a", "d:a", "p:b", "d:b", "p:c"]


def test_a_static_batch_is_the_waiting_requests_and_no_request_joins_it() -> None:
    simulation = Simulation(make_limits(batching=STATIC, decode_steps_ahead=0, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 4), make_request("b", 5, 2))
    simulation.step()
    simulation.add(make_request("c", 5, 2), make_request("d", 5, 1))
    simulation.finish()
    assert order(simulation) == ["p:ab", "d:ab", "d:a", "d:a", "p:cd", "d:c"]


def test_a_static_batch_never_exceeds_its_size() -> None:
    simulation = Simulation(make_limits(batching=STATIC, batch_size=3, decode_steps_ahead=0, prefill_batch_size=2))
    simulation.add(*(make_request(name, 5, 2) for name in "abcde"))
    simulation.finish()
    assert order(simulation) == ["p:ab", "p:c", "d:abc", "p:de", "d:de"]


def test_a_request_that_arrives_during_the_prefill_of_a_batch_is_in_the_next_one() -> None:
    simulation = Simulation(make_limits(batching=STATIC, decode_steps_ahead=0, prefill_batch_size=1))
    simulation.add(make_request("a", 5, 2), make_request("b", 5, 2), make_request("c", 5, 2))
    simulation.schedule()
    simulation.add(make_request("late", 5, 2))
    simulation.finish()
    assert order(simulation) == ["p:a", "p:b", "p:c", "d:abc", "p:late", "d:late"]


def test_a_static_batch_is_smaller_if_blocks_are_missing() -> None:
    simulation = Simulation(
        make_limits(batching=STATIC, decode_steps_ahead=0, prefill_batch_size=4, num_blocks=17, page_attention=False)
    )
    simulation.add(*(make_request(name, 17, 12) for name in "abc"))
    simulation.finish()
    prefills = [step for step in order(simulation) if step.startswith("p")]
    assert prefills == ["p:ab", "p:c"]
    assert order(simulation).index("p:c") == 12


def test_a_dynamic_batch_starts_when_it_is_full() -> None:
    simulation = Simulation(make_limits(batching=DYNAMIC, batch_size=2, batch_waiting_time=5.0, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 2))
    assert simulation.schedule() == []
    assert simulation.scheduler.next_wakeup(0.0) == 5.0
    simulation.add(make_request("b", 5, 2), make_request("c", 5, 2))
    assert names(simulation.schedule()[0]) == "p:ab"
    simulation.finish()
    assert simulation.now == 5.0


def test_a_dynamic_batch_starts_after_its_waiting_time() -> None:
    simulation = Simulation(make_limits(batching=DYNAMIC, batch_size=8, batch_waiting_time=0.5, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 2, arrival=0.0), make_request("b", 5, 2, arrival=0.4))
    simulation.now = 0.49
    assert simulation.schedule() == []
    simulation.now = 0.5
    assert names(simulation.schedule()[0]) == "p:ab"
    simulation.finish()


def test_dynamic_batches_run_one_after_the_other() -> None:
    simulation = Simulation(
        make_limits(batching=DYNAMIC, batch_size=2, batch_waiting_time=0.5, prefill_batch_size=4, decode_steps_ahead=0)
    )
    simulation.add(*(make_request(name, 5, tokens) for name, tokens in zip("abcd", (4, 2, 1, 1), strict=True)))
    simulation.finish()
    assert order(simulation) == ["p:ab", "d:ab", "d:a", "d:a", "p:cd"]


@pytest.mark.parametrize("batching", BatchingStrategy)
def test_the_next_batch_starts_after_an_abort(batching: BatchingStrategy) -> None:
    simulation = Simulation(make_limits(batching=batching, batch_size=2, prefill_batch_size=2))
    simulation.add(*(make_request(name, 5, 20) for name in "abcd"))
    simulation.step()
    for name in "ab":
        simulation.end(name)
    simulation.finish()
    assert len(simulation.streams["d"]) == 20


@pytest.mark.parametrize("batching", [STATIC, DYNAMIC])
def test_a_preempted_request_returns_to_its_batch(batching: BatchingStrategy) -> None:
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


def test_contiguous_sequences_reserve_blocks_for_their_longest_output() -> None:
    simulation = Simulation(make_limits(page_attention=False, prefill_batch_size=4))
    simulation.add(make_request("a", 5, 8), make_request("b", 9, 8))
    (step, *_) = simulation.schedule()
    assert step.block_tables == [[1, 2, 3], [4, 5, 6, 7]]
    assert simulation.scheduler.figures.kv_waste == pytest.approx(1 - (6 + 10) / 28)
    simulation.finish()


def test_with_paged_blocks_only_the_last_block_has_empty_positions() -> None:
    simulation = Simulation(make_limits(prefill_batch_size=4, decode_steps_ahead=0))
    simulation.add(make_request("a", 5, 8), make_request("b", 8, 8))
    simulation.schedule()
    assert simulation.scheduler.figures.kv_waste == pytest.approx(3 / 16)
    simulation.finish()
    assert simulation.scheduler.figures.kv_waste == 0.0


def test_any_thread_may_read_the_figures_while_sequences_start_and_end() -> None:
    """While this thread reads the figures, a trace function adds a sequence at every line, as the engine thread could.
    """
    simulation = Simulation(make_limits(prefill_batch_size=4))
    simulation.add(make_request("a", 5, 8), make_request("b", 8, 8))
    simulation.schedule()
    state, before, switches = simulation.scheduler._state, sys.gettrace(), 0
    sequences, one = state.running._running, next(iter(state.running))

    def engine_thread(frame: FrameType, event: str, arg: object) -> object:
        nonlocal switches
        switches += 1
        sequences[1000 + switches] = one
        return engine_thread

    sys.settrace(engine_thread)
    try:
        figures = simulation.scheduler.figures
    finally:
        sys.settrace(before)
    assert 2 < figures.running <= 2 + switches
