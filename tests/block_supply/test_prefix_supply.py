"""Tests prefix hits in the scheduler, combined with steps in flight, aborts and preemption."""

from __future__ import annotations

import pytest

from llm_serving.request import Request
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import BlockMove, MoveKind, StepKind
from llm_serving.telemetry.receipt import BlockReason
from support.fakes import make_limits, make_request
from support.recorded import RecordProperty
from support.simulation import Simulation

SYSTEM_PROMPT = [2 + (5 * place) % 50 for place in range(16)]


def sharing(**changes: object) -> Simulation:
    values: dict[str, object] = {"prefix_cache": True, "decode_steps_ahead": 0, "prefill_batch_size": 4}
    return Simulation(make_limits(**{**values, **changes}))


def computed_tokens(simulation: Simulation, request: Request) -> int:
    """Returns how many tokens of a request's prompt were computed by steps, without its prefix hits."""
    prompt = len(request.prompt_token_ids)
    return sum(
        max(0, min(start + query_len, prompt) - start)
        for step in simulation.steps
        for other, start, query_len in zip(step.requests, step.starts, step.query_lens, strict=True)
        if other is request
    )


def test_a_second_request_starts_after_the_full_blocks_of_the_first() -> None:
    simulation = sharing()
    first, second = make_request("a", [*SYSTEM_PROMPT, 30, 31], 2), make_request("b", [*SYSTEM_PROMPT, 40, 41], 2)
    simulation.add(first)
    simulation.finish()
    simulation.add(second)
    (step,) = simulation.schedule()
    assert (step.starts, step.query_lens, step.restarts) == ([16], [2], [True])
    assert step.block_tables[0][:4] == simulation.steps[0].block_tables[0][:4]
    assert step.moves == []
    assert (second.num_cached_tokens, second.receipt.cached_tokens) == (16, 16)
    figures = simulation.scheduler.figures
    assert (figures.prefix_hit_tokens, figures.prefix_query_tokens) == (16, 36)
    simulation.finish()


def test_a_hit_that_ends_inside_a_block_copies_it_first() -> None:
    simulation = sharing()
    running = make_request("a", [*SYSTEM_PROMPT, 30, 31, 32], 20)
    simulation.add(running)
    simulation.step()
    simulation.add(make_request("b", [*SYSTEM_PROMPT, 30, 31, 40], 2))
    step = simulation.schedule()[0]
    assert (step.kind, step.starts, step.query_lens) == (StepKind.PREFILL, [18], [1])
    source, destination = simulation.steps[0].block_tables[0][4], step.block_tables[0][4]
    assert step.moves == [BlockMove(MoveKind.COPY, source, destination)]
    assert source != destination
    simulation.finish()


def test_the_last_token_of_a_fully_cached_prompt_is_computed() -> None:
    simulation = sharing()
    simulation.add(make_request("a", SYSTEM_PROMPT, 2))
    simulation.finish()
    again = make_request("b", SYSTEM_PROMPT, 2)
    simulation.add(again)
    (step,) = simulation.schedule()
    assert (step.starts, step.query_lens, step.do_sample) == ([15], [1], [True])
    simulation.finish()


@pytest.mark.parametrize("policy", Policy)
def test_a_burst_with_a_shared_prompt_computes_it_once(policy: Policy) -> None:
    simulation = sharing(policy=policy, num_blocks=100, max_num_batched_tokens=200)
    requests = [make_request(f"r{index}", [*SYSTEM_PROMPT, 30 + index], 3) for index in range(8)]
    simulation.add(*requests)
    simulation.finish()
    assert [computed_tokens(simulation, request) for request in requests] == [17, *[1] * 7]
    assert requests[1].receipt.num_blocked[BlockReason.PREFIX] > 0


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_requests_with_the_same_prompt_wait_for_all_its_chunks(policy: Policy) -> None:
    simulation = sharing(policy=policy, chunk_tokens=16, max_num_batched_tokens=20, decode_steps_ahead=1)
    prompt = [*SYSTEM_PROMPT, *SYSTEM_PROMPT, 7, 8, 9]
    requests = [make_request(name, prompt, 3, seed=place) for place, name in enumerate("abc")]
    simulation.add(*requests)
    simulation.finish()
    assert [computed_tokens(simulation, request) for request in requests[1:]] == [1, 1]


def test_equal_prompts_that_end_with_a_block_do_not_wait_for_each_other() -> None:
    simulation = sharing(num_blocks=100)
    requests = [make_request(f"r{index}", SYSTEM_PROMPT, 4, seed=index) for index in range(5)]
    simulation.add(*requests)
    simulation.finish()
    prefills = [step for step in simulation.steps if step.kind is StepKind.PREFILL]
    assert [step.num_seqs for step in prefills] == [1, 4]


def test_a_request_computes_the_prefix_if_the_first_one_is_aborted() -> None:
    simulation = sharing(decode_steps_ahead=1)
    owner, other = make_request("owner", [*SYSTEM_PROMPT, 30], 3), make_request("other", [*SYSTEM_PROMPT, 31], 3)
    simulation.add(owner, other)
    simulation.schedule()
    simulation.end("owner")
    simulation.drop_void_steps()
    simulation.finish()
    assert computed_tokens(simulation, other) == 17


def test_a_failed_step_caches_nothing() -> None:
    simulation = sharing()
    simulation.add(make_request("a", [*SYSTEM_PROMPT, 30], 3))
    simulation.schedule()
    simulation.fail_step("no")
    other = make_request("b", [*SYSTEM_PROMPT, 31], 3)
    simulation.add(other)
    simulation.finish()
    assert computed_tokens(simulation, other) == 17


def test_a_dropped_step_of_an_ended_request_caches_nothing() -> None:
    simulation = sharing(max_num_batched_tokens=8)
    simulation.add(make_request("a", [*SYSTEM_PROMPT, 30], 3))
    simulation.schedule()
    simulation.end("a")
    simulation.drop_void_steps()
    other = make_request("b", [*SYSTEM_PROMPT, 31], 3)
    simulation.add(other)
    simulation.finish()
    assert computed_tokens(simulation, other) == 17


def test_the_cache_is_empty_after_the_agent_was_lost() -> None:
    simulation = sharing()
    simulation.add(make_request("a", [*SYSTEM_PROMPT, 30], 3))
    simulation.finish()
    simulation.lose_agent()
    other = make_request("b", [*SYSTEM_PROMPT, 31], 3)
    simulation.add(other)
    simulation.finish()
    assert computed_tokens(simulation, other) == 17


def test_requests_with_another_salt_share_nothing() -> None:
    simulation = sharing()
    simulation.add(make_request("a", SYSTEM_PROMPT, 2))
    simulation.finish()
    other = make_request("b", SYSTEM_PROMPT, 2)
    other.cache_salt = b"other"
    simulation.add(other)
    simulation.finish()
    assert computed_tokens(simulation, other) == 16


def test_the_next_turn_of_a_conversation_finds_the_output() -> None:
    simulation = sharing()
    first = make_request("a", [*SYSTEM_PROMPT, 30], 8)
    simulation.add(first)
    simulation.finish()
    turn = make_request("b", [*first.prompt_token_ids, *first.output_token_ids, 40], 2)
    simulation.add(turn)
    simulation.finish()
    # The cache never contains the last output token, because no step has computed its keys and values.
    assert turn.num_cached_tokens == 17 + 7
    assert computed_tokens(simulation, turn) == 2


def test_penalties_send_the_whole_history_even_if_most_of_it_is_cached() -> None:
    simulation = sharing()
    simulation.add(make_request("a", SYSTEM_PROMPT, 2))
    simulation.finish()
    simulation.add(make_request("b", [*SYSTEM_PROMPT, 9], 4, repetition_penalty=1.2))
    (step,) = simulation.schedule()
    assert step.starts == [16]
    assert step.histories[0].token_ids == [*SYSTEM_PROMPT, 9]
    simulation.finish()


def test_histories_beyond_the_capacity_of_a_step_go_into_several_steps() -> None:
    simulation = sharing(max_num_batched_tokens=10, max_model_len=24, max_prompt_len=24)
    simulation.add(make_request("a", SYSTEM_PROMPT, 2))
    simulation.finish()
    requests = [make_request(name, [*SYSTEM_PROMPT, 9], 3, seed=ord(name), presence_penalty=0.5) for name in "bcd"]
    simulation.add(*requests)
    (first, *_) = simulation.schedule()
    assert len(first.histories) == 1  # 17 of 24 tokens
    simulation.finish()


@pytest.mark.parametrize("prompt", [15, 16, 17])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("abort", ["", "old", "young"])
def test_preemption_with_a_prefix_hit_a_block_border_and_an_abort(
    prompt: int, ahead: int, abort: str, record_property: RecordProperty
) -> None:
    """After a preemption, a sequence starts again with the blocks of its prefix that are still in the cache.

    The sequence itself or another sequence has computed these blocks.
    """
    simulation = sharing(num_blocks=10, max_model_len=37, max_prompt_len=36, decode_steps_ahead=ahead)
    simulation.checks_texts = False
    tokens = [*SYSTEM_PROMPT, 9][:prompt]
    old, young = make_request("old", tokens, 14), make_request("young", tokens, 14, seed=5)
    simulation.add(old, young)
    for _ in range(200):
        simulation.schedule()
        if young.num_preemptions or young.is_finished:
            break
        simulation.answer()
    if abort:
        simulation.end(abort)
    simulation.finish()
    wrong = simulation.wrong_texts(37)
    record_property("wrong_hits", f"{len(wrong)} of {len(simulation.requests)}")
    assert wrong == []


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    simulation = sharing(num_blocks=17, max_model_len=61, decode_steps_ahead=1)
    old, young = make_request("old", 20, 40), make_request("young", 20, 24)
    simulation.add(old, young)
    simulation.finish()
    assert young.num_preemptions == 1
    again = [step for step in simulation.steps if step.kind is StepKind.PREFILL and young in step.requests][-1]
    assert again.starts[0] > 0


def test_no_sequence_is_preempted_for_a_block_that_a_copy_holds() -> None:
    """The second request needs the whole pool.

    For a short time, one block is held as the source of a copy. No sequence is preempted for this block.
    """
    simulation = sharing(num_blocks=11, block_size=2, max_model_len=20, decode_steps_ahead=1, policy=Policy.FCFS)
    first, second = make_request("a", SYSTEM_PROMPT[:7], 2), make_request("b", [*SYSTEM_PROMPT, 30, 31], 2)
    simulation.add(first, second)
    simulation.finish()
    assert second.num_cached_tokens == 7
    assert second.num_preemptions == 0
