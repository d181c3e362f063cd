"""Tests preemption by recompute, combined with block borders, aborts, ends and steps in flight."""

from __future__ import annotations

import random

import pytest

from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import StepKind
from support.fakes import make_limits, make_request
from support.recorded import RecordProperty
from support.simulation import Simulation


def crowded(num_blocks: int, *, ahead: int = 1, block_size: int = 4, **changes: object) -> Simulation:
    """Returns a simulation with so few blocks that requests preempt each other."""
    return Simulation(
        make_limits(
            num_blocks=num_blocks + 1, block_size=block_size, decode_steps_ahead=ahead, max_model_len=40, **changes
        )
    )


def recomputed_share(simulation: Simulation) -> float:
    """Returns how many tokens were computed again for each token that had to be computed once.

    The last token of an output is not computed.
    """
    requests = simulation.requests.values()
    useful = sum(len(one.prompt_token_ids) + len(one.output_token_ids) - 1 for one in requests)
    return sum(step.num_tokens for step in simulation.steps) / useful - 1


def run_until_preempted(simulation: Simulation, request: Request) -> None:
    for _ in range(200):
        simulation.schedule()
        if request.num_preemptions:
            return
        simulation.answer()
    raise AssertionError(f"{request.request_id} was never preempted")


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_the_latest_is_preempted_first_and_the_oldest_never(
    ahead: int, block_size: int, record_property: RecordProperty
) -> None:
    simulation = crowded(48 // block_size, ahead=ahead, block_size=block_size)
    requests = [make_request(name, 4, 30) for name in "abcd"]
    simulation.add(*requests)
    simulation.finish()
    record_property("recomputed_share", recomputed_share(simulation))
    preemptions = [request.num_preemptions for request in requests]
    assert preemptions[0] == 0
    assert sum(preemptions) == simulation.scheduler.figures.preemptions > 0
    assert preemptions[3] >= preemptions[1]
    ends = [request.finish_time for request in requests]
    assert all(end is not None for end in ends)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_a_pool_of_one_longest_sequence_serves_any_number(ahead: int, record_property: RecordProperty) -> None:
    simulation = Simulation(
        make_limits(num_blocks=10, block_size=4, max_model_len=37, max_prompt_len=36, decode_steps_ahead=ahead)
    )
    assert simulation.scheduler.figures.total_blocks * 4 == 36
    simulation.add(*(make_request(f"r{index}", 1 + index % 12, 36) for index in range(10)))
    simulation.finish()
    record_property("recomputed_share", recomputed_share(simulation))
    assert all(reason is FinishReason.LENGTH for reason in simulation.ended.values())


def test_a_victim_keeps_its_blocks_until_its_steps_complete_and_its_tokens_always() -> None:
    simulation = crowded(8, ahead=2)
    old, young = make_request("old", 9, 22), make_request("young", 9, 22)
    simulation.add(old, young)
    run_until_preempted(simulation, young)
    scheduler = simulation.scheduler
    assert (scheduler.figures.running, scheduler.figures.waiting) == (1, 1)
    assert young.status is RequestStatus.RUNNING
    assert young.row == 1
    assert scheduler.figures.free_blocks == 0
    known = len(young.output_token_ids)
    inflight = young.num_inflight_tokens
    assert inflight > 0
    while young.num_inflight_tokens:
        simulation.answer()
    assert young.status is RequestStatus.WAITING
    assert (young.row, young.num_computed_tokens) == (-1, 0)
    assert len(young.output_token_ids) == known + inflight
    assert scheduler.figures.free_blocks > 0
    simulation.finish()


def test_a_victim_restarts_with_prompt_and_output_in_one_prefill() -> None:
    simulation = crowded(8)
    old, young = make_request("old", 9, 22), make_request("young", 9, 22)
    simulation.add(old, young)
    run_until_preempted(simulation, young)
    simulation.finish()
    again = [step for step in simulation.steps if step.kind is StepKind.PREFILL][1:]
    assert [step.requests for step in again] == [[young]]
    assert again[0].starts == [0]
    assert again[0].sample_positions == [again[0].num_tokens - 9]
    assert again[0].num_tokens > 9


def test_victims_restart_before_new_requests_in_order_of_arrival() -> None:
    simulation = crowded(12, prefill_batch_size=1)
    requests = [make_request(name, 6, 28) for name in "abc"]
    simulation.add(*requests)
    run_until_preempted(simulation, requests[2])
    simulation.add(make_request("late", 1, 3))
    simulation.finish()
    first_steps = {}
    for step in simulation.steps:
        for request in step.requests:
            first_steps.setdefault(request.request_id, step.seq)
    last_restart = max(s.seq for s in simulation.steps if s.kind is StepKind.PREFILL and requests[2] in s.requests)
    assert first_steps["late"] >= last_restart


@pytest.mark.parametrize("prompt", [7, 8, 9])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_preemption_at_below_and_past_a_block_border(prompt: int, ahead: int) -> None:
    simulation = crowded(7, ahead=ahead)
    old, young = make_request("old", 8, 20), make_request("young", prompt, 20)
    simulation.add(old, young)
    run_until_preempted(simulation, young)
    simulation.finish()
    assert old.num_preemptions == 0


@pytest.mark.parametrize("who", ["old", "young"])
@pytest.mark.parametrize("when", ["draining", "waiting", "running again"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("prompt", [7, 8, 9])
def test_preemption_and_abort(who: str, when: str, ahead: int, prompt: int, record_property: RecordProperty) -> None:
    simulation = crowded(8, ahead=ahead)
    old, young = make_request("old", prompt, 22), make_request("young", prompt, 22)
    simulation.add(old, young)
    run_until_preempted(simulation, young)
    assert young.num_inflight_tokens > 0
    if when != "draining":
        while young.status is not RequestStatus.WAITING:
            simulation.step()
    if when == "running again":
        while young.status is not RequestStatus.RUNNING:
            simulation.step()
    simulation.end(who)
    simulation.finish()
    record_property("lost_blocks", f"{simulation.num_held_blocks} of 1")
    expected = {"old": FinishReason.LENGTH, "young": FinishReason.LENGTH, who: FinishReason.ABORT}
    if when == "running again" and who == "old":
        del expected["old"], simulation.ended["old"]  # the request may have ended before the abort
    assert simulation.ended == expected


def test_a_victim_that_ends_while_it_leaves_does_not_restart() -> None:
    """Steps in flight sample the last tokens of the preempted sequence.

    If the sequence ends with these tokens, it is not recomputed.
    """
    for max_tokens in range(3, 25):
        simulation = crowded(8, ahead=3)
        old, young = make_request("old", 9, 22), make_request("young", 9, max_tokens)
        simulation.add(old, young)
        simulation.finish()
        if young.num_preemptions:
            prefills = [step for step in simulation.steps if step.kind is StepKind.PREFILL and young in step.requests]
            if len(prefills) == 1:
                assert simulation.ended["young"] is FinishReason.LENGTH
                return
    raise AssertionError("no case found")


def test_a_victim_with_penalties_sends_its_whole_history_again() -> None:
    simulation = crowded(8)
    old = make_request("old", 9, 22, frequency_penalty=0.5)
    young = make_request("young", 9, 22, repetition_penalty=1.1)
    simulation.add(old, young)
    run_until_preempted(simulation, young)
    simulation.finish()
    histories = [step.histories[-1] for step in simulation.steps if step.histories]
    assert [history.num_prompt_tokens for history in histories] == [9, 9]
    assert histories[1].token_ids == [
        *young.prompt_token_ids,
        *young.output_token_ids[: len(histories[1].token_ids) - 9],
    ]


def test_a_victim_longer_than_a_step_is_recomputed_in_chunks() -> None:
    simulation = crowded(8, max_num_batched_tokens=10)
    old, young = make_request("old", 9, 22), make_request("young", 9, 22)
    simulation.add(old, young)
    run_until_preempted(simulation, young)
    simulation.finish()
    chunks = [step for step in simulation.steps if step.kind is StepKind.PREFILL and young in step.requests]
    assert [step.do_sample for step in chunks] == [[True], *[[False]] * (len(chunks) - 2), [True]]
    assert len(chunks) >= 3


def test_a_sequence_is_preempted_between_its_chunks() -> None:
    """The oldest sequence needs a block while the latest sequence is between two chunks of its prefill.

    The latest sequence is preempted and must compute its chunks again.
    """
    simulation = crowded(10, ahead=0, max_num_batched_tokens=4, policy=Policy.FCFS, prefill_batch_size=1)
    old, young = make_request("old", 4, 30), make_request("young", 22, 6)
    simulation.add(old)
    for _ in range(14):
        simulation.step()
    simulation.add(young)
    simulation.finish()
    starts = [step.starts[0] for step in simulation.steps if step.kind is StepKind.PREFILL and young in step.requests]
    assert starts.count(0) == 1 + young.num_preemptions


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_the_blocks_of_a_victim_go_to_the_oldest(ahead: int) -> None:
    """The blocks of a preempted sequence go to the oldest sequence, which needs them for its next token.

    Neither the preempted sequence nor a new request may take these blocks.
    """
    simulation = crowded(8, ahead=ahead)
    old, young = make_request("old", 9, 22), make_request("young", 9, 22)
    simulation.add(old, young)
    run_until_preempted(simulation, young)
    simulation.add(make_request("new", 1, 1))
    simulation.finish()
    assert simulation.scheduler.figures.preemptions == young.num_preemptions == 1
    restart = next(s.seq for s in simulation.steps[1:] if s.kind is StepKind.PREFILL and young in s.requests)
    assert all(old not in step.requests for step in simulation.steps[restart:])


@pytest.mark.parametrize("ahead", [0, 1])
def test_several_victims_are_preempted_in_one_step_if_necessary(ahead: int) -> None:
    """Six sequences need a new block, and no block is free.

    Two sequences are preempted, so that the other four continue.
    """
    simulation = crowded(18, ahead=ahead, max_num_seqs=6, prefill_batch_size=6)
    requests = [make_request(name, 5, 20) for name in "abcdef"]
    simulation.add(*requests)
    while simulation.scheduler.figures.preemptions == 0:
        simulation.schedule()
        simulation.answer()
    assert [request.num_preemptions for request in requests] == [0, 0, 0, 0, 1, 1]
    simulation.finish()


def test_the_other_sequences_decode_if_the_chosen_one_is_preempted() -> None:
    """Each decode step has one sequence.

    If this is the latest sequence and no block is free, it is preempted and another sequence decodes.
    """
    for num_blocks in range(8, 16):
        simulation = crowded(num_blocks, ahead=0, decode_batch_size=1)
        simulation.add(*(make_request(name, 7, 22) for name in "abc"))
        simulation.finish()


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_every_interleaving_of_pressure_and_aborts_ends_well(
    policy: Policy, ahead: int, record_property: RecordProperty
) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        simulation = crowded(10, ahead=ahead, block_size=rng.choice([4, 5]), policy=policy, max_prompt_len=30)
        simulation.add(*(make_request(f"r{index}", rng.randrange(1, 20), rng.randrange(1, 20)) for index in range(12)))
        for _ in range(40):
            simulation.step() if not simulation.scheduler.is_idle else None
            if rng.random() < 0.1:
                simulation.end(f"r{rng.randrange(12)}")
        simulation.finish()
        record_property("lost_blocks", f"{simulation.num_held_blocks} of {simulation.seen['ends from outside']}")


def test_the_least_important_is_preempted_first_but_never_the_oldest() -> None:
    simulation = crowded(18, max_num_seqs=4, prefill_batch_size=4)
    requests = [make_request(name, 5, 28) for name in "abcd"]
    for request, priority in zip(requests, (9, 5, 0, 0), strict=True):
        request.priority = priority
    # Each request starts before the next one arrives. If they waited together, the queue would start them by priority.
    for request in requests:
        simulation.add(request)
        simulation.schedule()
    while simulation.scheduler.figures.preemptions == 0:
        simulation.schedule()
        simulation.answer()
    assert [request.num_preemptions for request in requests] == [0, 1, 0, 0]
    simulation.finish()
    assert requests[0].num_preemptions == 0


def test_tenants_alternate_by_their_service() -> None:
    simulation = Simulation(make_limits(max_num_seqs=1, decode_steps_ahead=0, num_blocks=60))
    greedy = [make_request(f"g{index}", 5, 20) for index in range(4)]
    modest = [make_request(f"m{index}", 5, 20) for index in range(2)]
    for request in greedy:
        request.tenant = "greedy"
    for request in modest:
        request.tenant = "modest"
    simulation.add(*greedy, *modest)
    simulation.finish()
    started = [step.requests[0].request_id for step in simulation.steps if step.kind is StepKind.PREFILL]
    assert started == ["g0", "m0", "g1", "m1", "g2", "g3"]


def test_clients_without_a_key_are_charged_like_clients_with_one() -> None:
    """Each prompt has one token and each output has seven.

    If only prompts counted, requests without a key would start first.
    """
    simulation = Simulation(make_limits(max_num_seqs=1, decode_steps_ahead=0, policy=Policy.FCFS))
    for turn in range(8):
        keyed = make_request(f"keyed {turn}", 1, 7)
        keyed.tenant = "a"
        simulation.add(make_request(f"anybody {turn}", 1, 7), keyed)
    simulation.finish()
    starts = [step.requests[0].request_id.split()[0] for step in simulation.steps if step.kind is StepKind.PREFILL]
    assert starts == ["anybody", "keyed"] * 8
