"""Tests the order of steps, the sequences of decode steps, and waiting times, for each policy."""

from __future__ import annotations

import random
from itertools import product

import pytest

from llm_serving.policies.prefill_first import prefill_streak_limit
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import StepKind
from support.fakes import make_limits, make_request
from support.simulation import Simulation, names, order, random_run
from support.sweeps import with_sweeps

PREFILL_FIRST, FCFS = Policy.PREFILL_FIRST, Policy.FCFS


@pytest.mark.parametrize(
    ("policy", "second"), [(PREFILL_FIRST, ["p:b", "d:a"]), (FCFS, ["d:a", "p:b"])], ids=["prefill_first", "fcfs"]
)
def test_a_new_request_overtakes_queued_decodes_under_prefill_first_only(policy: Policy, second: list[str]) -> None:
    simulation = Simulation(make_limits(policy=policy, prefill_batch_size=1))
    simulation.add(make_request("a", 5, 6))
    simulation.step()
    simulation.step()
    simulation.add(make_request("b", 5, 4))
    simulation.finish()
    assert order(simulation) == ["p:a", "d:a", *second, "d:ab", "d:ab", "d:ab"]


def test_a_burst_is_prefilled_before_it_decodes_together_under_prefill_first() -> None:
    simulation = Simulation(make_limits(policy=PREFILL_FIRST, prefill_batch_size=1))
    simulation.add(*(make_request(name, 5, 3) for name in "abcde"))
    simulation.finish()
    assert order(simulation) == ["p:a", "p:b", "p:c", "p:d", "p:e", "d:abcde", "d:abcde"]


def test_prefill_and_decode_alternate_under_fcfs() -> None:
    simulation = Simulation(make_limits(policy=FCFS, prefill_batch_size=1, max_num_seqs=8))
    simulation.add(*(make_request(name, 5, 9) for name in "abcdef"))
    simulation.finish()
    assert order(simulation)[:9] == ["p:a", "p:b", "d:ab", "p:c", "p:d", "d:abcd", "p:e", "p:f", "d:abcdef"]


@pytest.mark.parametrize(
    ("ahead", "policy"), with_sweeps(product([0, 1, 2, 3], Policy), lambda ahead, _: ahead in (1, 2))
)
def test_the_batch_does_not_split_into_alternating_groups(policy: Policy, ahead: int) -> None:
    """The batch must not split into groups that decode alternately.

    Soon after the last prefill, every decode step contains all running sequences.
    """
    for seed in range(2):
        rng = random.Random(seed)
        limits = make_limits(policy=policy, decode_steps_ahead=ahead, num_blocks=500, max_model_len=200)
        simulation = Simulation(limits)
        waiting = [make_request(name, rng.randrange(1, 9), 180) for name in "abcdefgh"]
        while waiting:
            if rng.random() < 0.3:
                simulation.add(waiting.pop())
            simulation.step() if rng.random() < 0.9 and simulation.requests else simulation.schedule()
        while simulation.scheduler.figures.waiting:  # with policy ``decode_first``, prompts wait for many steps
            simulation.step()
        for _ in range(8):
            simulation.step()
        first = len(simulation.steps)
        for _ in range(10):
            simulation.step()
        assert [step.num_seqs for step in simulation.steps[first:]] == [8] * len(simulation.steps[first:])
        assert len(simulation.steps) - first == 10
        simulation.finish()


@pytest.mark.parametrize(
    ("ahead", "policy"),
    with_sweeps(
        product([0, 1, 2, 3], [policy for policy in Policy if policy is not Policy.DECODE_FIRST]),
        lambda ahead, _: ahead in (1, 2),
    ),
)
def test_prefills_do_not_leave_decoding_sequences_behind(policy: Policy, ahead: int) -> None:
    """While requests arrive steadily, almost every decode step contains almost all sequences."""
    simulation = Simulation(make_limits(policy=policy, decode_steps_ahead=ahead, num_blocks=400, prefill_batch_size=1))
    for index in range(60):
        simulation.add(make_request(f"r{index}", 5, 20))
        for _ in range(4):
            simulation.step()
    simulation.finish()
    rows = [sum(start >= 5 for start in step.starts) for step in simulation.steps if step.kind is not StepKind.PREFILL]
    assert sum(rows) == 60 * 19
    # A mixed step has prompts and decodes. So each step that runs while requests arrive may contain decodes.
    num_steps_of_arrivals = 60 * 4
    assert len(rows) < (num_steps_of_arrivals + 20 if policy in (Policy.CHUNKED, Policy.SLO) else 200)


def test_one_token_requests_do_not_stop_the_others() -> None:
    limits = make_limits(policy=PREFILL_FIRST, prefill_batch_size=1, max_num_seqs=4)
    assert prefill_streak_limit(4, 1) == 4
    simulation = Simulation(limits)
    simulation.add(make_request("long", 5, 9))
    simulation.step()
    for index in range(100):
        simulation.add(make_request(f"s{index}", 5, 1))
        if simulation.requests["long"].is_finished:
            break
        simulation.step()
    assert simulation.requests["long"].is_finished
    run_length = longest = 0
    for seq in simulation.device.ran:
        run_length = run_length + 1 if simulation.steps[seq].kind is StepKind.PREFILL else 0
        longest = max(longest, run_length)
    assert longest == 5
    simulation.finish()


def test_a_prefill_waits_for_its_batch_to_fill() -> None:
    simulation = Simulation(make_limits(batch_waiting_time=0.5, prefill_batch_size=2))
    simulation.now = 10.0
    simulation.add(make_request("a", arrival=9.8))
    assert simulation.schedule() == []
    assert simulation.scheduler.next_wakeup(10.0) == pytest.approx(10.3)
    simulation.now = 10.1
    simulation.add(make_request("b", arrival=10.1))
    assert names(simulation.schedule()[0]) == "p:ab"
    assert simulation.scheduler.next_wakeup(10.1) is None
    simulation.finish()


def test_the_waiting_time_of_a_prefill_is_limited() -> None:
    simulation = Simulation(make_limits(batch_waiting_time=0.5, prefill_batch_size=4))
    simulation.add(make_request("a", arrival=0.0), make_request("b", arrival=0.4))
    simulation.now = 0.49
    assert simulation.schedule() == []
    simulation.now = 0.5
    assert names(simulation.schedule()[0]) == "p:ab"
    simulation.finish()


@pytest.mark.parametrize("full", ["tokens", "rows"])
def test_a_prefill_does_not_wait_for_requests_that_cannot_join(full: str) -> None:
    changes = {"max_num_batched_tokens": 10} if full == "tokens" else {"max_num_seqs": 2}
    simulation = Simulation(make_limits(batch_waiting_time=9.0, prefill_batch_size=8, **changes))
    simulation.add(make_request("a"), make_request("b"))
    assert names(simulation.schedule()[0]) == "p:ab"
    simulation.finish()


def test_a_decode_waits_for_sequences_in_prefill() -> None:
    simulation = Simulation(
        make_limits(policy=FCFS, decode_steps_ahead=0, decode_batch_waiting_time=0.5, prefill_batch_size=1)
    )
    simulation.add(make_request("a", 5, 4), make_request("b", 5, 4))
    simulation.schedule()
    simulation.answer()
    assert simulation.schedule() == []
    assert simulation.scheduler.next_wakeup(0.0) == 0.5
    simulation.answer()
    assert [names(step) for step in simulation.schedule()] == ["d:ab"]
    simulation.finish()


def test_the_waiting_time_of_a_decode_is_limited() -> None:
    simulation = Simulation(
        make_limits(policy=FCFS, decode_steps_ahead=0, decode_batch_waiting_time=0.5, prefill_batch_size=1)
    )
    simulation.add(make_request("a", 5, 4), make_request("b", 5, 4))
    simulation.schedule()
    simulation.answer()
    assert simulation.schedule() == []
    simulation.now = 0.5
    assert [names(step) for step in simulation.schedule()] == ["d:a"]
    simulation.answer()
    simulation.answer()
    assert [names(step) for step in simulation.schedule()] == ["d:ab"]
    simulation.finish()


@pytest.mark.parametrize("policy", Policy)
def test_both_orders_give_the_same_text(policy: Policy) -> None:
    simulation = Simulation(make_limits(policy=policy))
    requests = [make_request(f"r{index}", 3 + index % 7, 12, ignore_eos=False) for index in range(40)]
    random_run(simulation, requests, random.Random(3))
    assert len(simulation.ended) == 40
