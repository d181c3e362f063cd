"""Tests drafts in the scheduler. Drafts change no token and no log-probability, whatever happens to their requests."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from llm_serving.ipc.drafts import REJECTED
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from support.fakes import END_TOKEN, expected_tokens, make_limits, make_request
from support.scheduler_scripts import Script, play
from support.script_drawing import draw_script
from support.simulation import Simulation
from support.sweeps import with_sweeps

SCRIPTS_PER_PART = 50


def play_with_drafts(seeds: range) -> Counter[str]:
    """Runs the scripts of these seeds with drafts. Returns the events that occurred.

    Each run checks that the tokens and the bits of the log-probabilities of every request are those of the request
    alone without drafts.
    """
    seen: Counter[str] = Counter()
    for seed in seeds:
        script = draw_script(seed)
        limits = script.limits | {"max_decode_entries": random.Random(seed).choice([None, 8, 12])}
        simulation = play(Script(limits, script.operations), drafts=seed)
        seen += simulation.seen
    return seen


@pytest.mark.parametrize("part", with_sweeps([(part,) for part in range(200)], lambda part: part >= 1))
def test_drafts_change_no_token_and_no_log_probability_in_any_script(part: int) -> None:
    """Together the parts run 10,000 scripts, with preemptions, swaps, chunks, cached prefixes and losses of agents."""
    seen = play_with_drafts(range(50_000 + part * SCRIPTS_PER_PART, 50_000 + (part + 1) * SCRIPTS_PER_PART))
    for event in ("drafts", "tokens of drafts", "preemptions", "agents lost", "cached starts", "chunks", "swaps"):
        assert seen[event] > 0, event


def schedule_one(simulation: Simulation) -> ScheduledStep:
    """Schedules a single step, even if more steps could be sent ahead."""
    step = simulation.scheduler.schedule(simulation.now)
    assert step is not None
    simulation._watch(step)
    simulation.steps.append(step)
    return step


def run_to_drafted_step(simulation: Simulation, name: str, draft: list[int]) -> ScheduledStep:
    """Runs a request alone to its first output token, offers ``draft``, and returns the step that verifies it."""
    schedule_one(simulation)
    simulation.answer()
    simulation.scheduler.offer_drafts([(name, draft)])
    return schedule_one(simulation)


def drafted(number: int, wrong: int | None = None, **sampling: Any) -> tuple[Simulation, ScheduledStep, list[int]]:
    """Returns a simulation with a step that verifies ``number`` drafts, and the expected tokens of its request.

    ``wrong`` is the index of a wrong draft.
    """
    simulation = Simulation(make_limits(decode_steps_ahead=0))
    request = make_request("a", 6, sampling.pop("max_tokens", 12), **sampling)
    simulation.add(request)
    expected = expected_tokens(request, 64)
    draft = expected[1 : 1 + number]
    if wrong is not None:
        draft[wrong] = (draft[wrong] + 1) % 50
    return simulation, run_to_drafted_step(simulation, "a", draft), expected


def test_right_drafts_give_several_tokens_in_one_step() -> None:
    simulation, step, expected = drafted(3)
    assert (step.kind, step.num_seqs, step.num_drafts) == (StepKind.DECODE, 4, 3)
    assert step.token_ids == expected[:4]
    assert step.sample_positions == [1, 2, 3, 4]
    updates = simulation.answer()
    assert [update.token_id for update in updates] == expected[1:5]
    assert [update.num_later for update in updates] == [3, 2, 1, 0]
    simulation.finish()
    simulation.check_texts(64)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_tokens_up_to_the_first_wrong_draft_count(wrong: int) -> None:
    simulation, _, expected = drafted(3, wrong)
    updates = simulation.answer()
    assert [update.token_id for update in updates] == expected[1 : wrong + 2]
    request = simulation.requests["a"]
    assert request.num_computed_tokens == request.num_tokens - 1
    simulation.finish()
    simulation.check_texts(64)


def test_penalties_count_only_the_tokens_before() -> None:
    simulation, _, _ = drafted(3, 1, presence_penalty=0.5)
    simulation.answer()
    simulation.finish()
    simulation.check_texts(64)


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_a_prompt_behind_a_step_with_drafts_gets_only_a_chunk(policy: Policy) -> None:
    """The next tokens of a sequence with drafts in flight wait for the step of the prompt."""
    limits = make_limits(policy=policy, decode_steps_ahead=1, chunk_tokens=20, tbt_objective=5e-3)
    simulation = Simulation(limits)
    request = make_request("a", 6, 40)
    simulation.add(request)
    expected = expected_tokens(request, 64)
    while len(request.output_token_ids) < 20:  # then policy slo has learnt the time of a step
        schedule_one(simulation)
        simulation.answer()
    draft = expected[len(request.output_token_ids) :][:3]
    simulation.scheduler.offer_drafts([("a", draft)])
    assert schedule_one(simulation).num_drafts
    simulation.add(make_request("long", 48, 2))
    step = schedule_one(simulation)
    assert [each.request_id for each in step.requests] == ["long"]
    assert step.num_tokens < 20
    simulation.finish()
    simulation.check_texts(64)


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_a_prompt_behind_a_sequence_with_a_draft_gets_only_a_chunk(policy: Policy) -> None:
    """The sequence is in a mixed step in flight. Its draft is not in this step, but the sequence waits for the end."""
    limits = make_limits(policy=policy, decode_steps_ahead=1, chunk_tokens=20, tbt_objective=5e-3, num_blocks=60)
    simulation = Simulation(limits)
    request = make_request("a", 6, 40)
    simulation.add(request)
    while len(request.output_token_ids) < 20:  # then policy slo has learnt the time of a step
        schedule_one(simulation)
        simulation.answer()
    simulation.add(make_request("first", 48, 2), make_request("second", 48, 2))
    assert schedule_one(simulation).kind is StepKind.MIXED
    simulation.scheduler.offer_drafts([("a", [1, 2, 3])])
    step = schedule_one(simulation)
    assert all(each.request_id != "a" for each in step.requests)
    assert step.num_tokens < 20
    simulation.finish()
    simulation.check_texts(64)


def test_drafts_end_before_max_tokens() -> None:
    simulation, step, expected = drafted(6, max_tokens=4)
    assert step.num_drafts == 2
    assert [update.token_id for update in simulation.answer()] == expected[1:4]
    assert simulation.scheduler.is_idle


def test_tokens_after_a_stop_token_do_not_count() -> None:
    request = make_request("a", 6, 12)
    stop = expected_tokens(request, 64)[2]
    simulation, step, _ = drafted(2, stop_token_ids=frozenset({stop}))
    simulation.scheduler.check_integrity()
    updates = simulation.answer()
    assert [update.token_id for update in updates][-1] == stop
    assert len(updates) <= step.num_seqs
    assert simulation.scheduler.is_idle
    assert simulation.requests["a"].output_token_ids[-1] == stop


def test_no_step_of_a_request_is_sent_behind_its_drafts() -> None:
    for ahead in (1, 3):
        simulation = Simulation(make_limits(decode_steps_ahead=ahead))
        request = make_request("a", 6, 12)
        simulation.add(request)
        run_to_drafted_step(simulation, "a", expected_tokens(request, 64)[1:2])
        assert simulation.schedule() == []


def test_an_offer_keeps_the_next_step_back_until_the_step_in_flight_has_completed() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=1))
    request = make_request("a", 6, 12)
    simulation.add(request)
    schedule_one(simulation)
    simulation.answer()
    schedule_one(simulation)
    simulation.scheduler.offer_drafts([("a", [1, 2])])
    assert simulation.scheduler.schedule(0.0) is None
    simulation.scheduler.offer_drafts([("a", [])])
    assert simulation.scheduler.schedule(0.0) is not None


def test_drafts_take_no_blocks_that_running_requests_need() -> None:
    simulation = Simulation(make_limits(num_blocks=5, block_size=2, max_model_len=9, max_prompt_len=8))
    request = make_request("a", 4, 5)
    simulation.add(request)
    step = run_to_drafted_step(simulation, "a", expected_tokens(request, 9)[1:4])
    assert step.num_drafts == 1, "the block of the next token has space for one more"
    simulation.answer()
    simulation.finish()
    simulation.check_texts(9)


def test_drafts_fill_only_the_free_entries_of_a_step() -> None:
    simulation = Simulation(make_limits(decode_batch_size=3, prefill_batch_size=3))
    requests = [make_request("a", 5, 9), make_request("b", 5, 9)]
    simulation.add(*requests)
    schedule_one(simulation)
    simulation.answer()
    simulation.scheduler.offer_drafts([(one.request_id, expected_tokens(one, 64)[1:4]) for one in requests])
    step = schedule_one(simulation)
    assert (step.num_seqs, step.num_drafts) == (3, 1)


def test_a_step_of_one_sequence_has_space_for_its_drafts() -> None:
    simulation = Simulation(make_limits(decode_batch_size=1, max_num_seqs=1, max_decode_entries=6))
    request = make_request("a", 5, 12)
    simulation.add(request)
    step = run_to_drafted_step(simulation, "a", expected_tokens(request, 64)[1:9])
    assert (step.num_seqs, step.num_drafts) == (6, 5)
    assert len(simulation.answer()) == 6
    simulation.finish()
    simulation.check_texts(64)


@pytest.mark.parametrize(
    "sampled_ids", [[5, REJECTED, 7, 8], [REJECTED, 1, 2, 3], [5, -1, 7, 8], [1, 2, 3, REJECTED - 1]]
)
def test_a_result_that_rejects_other_entries_fails(sampled_ids: list[int]) -> None:
    simulation, step, _ = drafted(3)
    result = StepResult(step.seq, sampled_ids, [0.0] * 4, [0.0] * 4)
    [update] = simulation.scheduler.update(result, 0.0)
    assert update.error is not None
    assert "sampled token" in update.error


def test_offers_for_unknown_requests_have_no_effect() -> None:
    simulation = Simulation(make_limits())
    simulation.scheduler.offer_drafts([("nobody", [1, END_TOKEN])])
    assert simulation.schedule() == []
