"""Tests mixed steps: their sequences, their token budget and their limits."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llm_serving.ipc.shm import LAST_TOKEN
from llm_serving.policies.decode_first import DECODE_STREAK_LIMIT
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import StepKind, StepReason
from support.fakes import make_limits, make_request
from support.simulation import Simulation


def chunked(**changes: object) -> Simulation:
    values: dict[str, object] = {"policy": Policy.CHUNKED, "decode_steps_ahead": 0, "chunk_tokens": 20}
    return Simulation(make_limits(**{**values, **changes}))


def test_decoding_sequences_come_first_and_a_prompt_fills_the_rest_of_the_budget() -> None:
    simulation = chunked()
    simulation.add(make_request("a", 5, 9), make_request("b", 6, 9))
    simulation.step()
    simulation.add(make_request("long", 40, 2))
    (step,) = simulation.schedule()
    assert (step.kind, step.reason) == (StepKind.MIXED, StepReason.BUDGET_SHARED)
    assert [request.request_id for request in step.requests] == ["a", "b", "long"]
    assert (step.query_lens, step.starts) == ([1, 1, 18], [5, 6, 0])
    assert (step.do_sample, step.sample_positions) == ([True, True, False], [1, 1, 0])
    assert (step.restarts, step.rows) == ([False, False, True], [0, 1, 2])
    simulation.answer()
    (step,) = simulation.schedule()
    assert (step.query_lens, step.starts, step.restarts) == ([1, 1, 18], [6, 7, 18], [False] * 3)
    simulation.answer()
    (step,) = simulation.schedule()
    assert (step.query_lens, step.do_sample) == ([1, 1, 4], [True] * 3)
    simulation.answer()
    (step,) = simulation.schedule()
    assert (step.kind, step.num_seqs) == (StepKind.DECODE, 3)
    simulation.finish()


def test_a_step_ahead_continues_after_the_previous_chunk() -> None:
    simulation = chunked(decode_steps_ahead=1)
    simulation.add(make_request("a", 5, 9), make_request("long", 30, 3))
    first, second = simulation.schedule()
    assert (first.kind, first.query_lens) == (StepKind.PREFILL, [5, 30])
    assert (second.kind, second.token_ids) == (StepKind.DECODE, [LAST_TOKEN, LAST_TOKEN])
    simulation.finish()


def test_several_prompts_share_the_rest_of_the_budget() -> None:
    simulation = chunked(prefill_batch_size=4)
    simulation.add(make_request("row", 5, 9))
    simulation.step()
    simulation.add(make_request("a", 8, 2), make_request("b", 8, 2), make_request("c", 8, 2))
    (step,) = simulation.schedule()
    assert step.query_lens == [1, 8, 8, 3]
    assert step.do_sample == [True, True, True, False]
    simulation.answer()
    (step,) = simulation.schedule()
    assert [request.request_id for request in step.requests] == ["row", "a", "b", "c"]
    assert step.query_lens == [1, 1, 1, 5]
    simulation.finish()


def test_prompts_get_a_minimum_of_tokens() -> None:
    simulation = chunked(chunk_tokens=4, prefill_batch_size=8, max_num_batched_tokens=64, max_num_seqs=6)
    simulation.add(*(make_request(name, 5, 30) for name in "abcde"))
    simulation.step()
    simulation.add(make_request("long", 40, 2))
    (step,) = simulation.schedule()
    assert step.query_lens == [1, 1, 1, 1, 1, 16]
    simulation.finish()


def test_decoding_sequences_that_fill_every_step_do_not_stop_a_prompt() -> None:
    simulation = chunked(max_num_batched_tokens=2, prefill_batch_size=1, max_num_seqs=3, num_blocks=60)
    simulation.add(make_request("a", 2, 60), make_request("b", 2, 60), make_request("c", 2, 3))
    simulation.finish()
    overdue = [step for step in simulation.steps if step.reason is StepReason.PROMPT_OVERDUE]
    assert [step.requests[0].request_id for step in overdue] == ["c"]
    assert simulation.requests["c"].first_scheduled_time is not None
    assert overdue[0].seq < 20


def test_sequences_that_need_no_further_step_do_not_limit_prompts() -> None:
    """The last tokens of the first prompts are in flight, so no sequence waits for the step of the next prompts."""
    simulation = chunked(decode_steps_ahead=1, max_num_batched_tokens=96, prefill_batch_size=2, num_blocks=60)
    simulation.add(*(make_request(name, 48, 1) for name in "abcd"))
    first, second = simulation.schedule()
    assert (first.query_lens, second.query_lens) == ([48, 48], [48, 48])
    simulation.finish()


def test_an_overdue_prompt_gets_a_whole_step() -> None:
    simulation = chunked(max_num_batched_tokens=20, decode_batch_size=20, max_num_seqs=21, num_blocks=200)
    simulation.add(*(make_request(f"row {number}", 1, 30) for number in range(20)))
    simulation.step()
    simulation.add(make_request("long", 40, 2))
    simulation.finish()
    overdue = [step for step in simulation.steps if step.reason is StepReason.PROMPT_OVERDUE]
    assert [step.num_tokens for step in overdue[:2]] == [20, 20]


def test_no_decoding_sequence_waits_for_a_prompt() -> None:
    simulation = chunked(decode_steps_ahead=1, num_blocks=60)
    row = make_request("row", 5, 30)
    simulation.add(row)
    simulation.step()
    simulation.add(make_request("long", 48, 2), make_request("next", 48, 2))
    before = len(simulation.steps)
    simulation.finish()
    steps = [step for step in simulation.steps[before:] if not row.is_finished or row in step.requests]
    assert all(row in step.requests for step in simulation.steps[before : before + 20])
    assert max(step.num_tokens for step in steps) <= 20


def test_a_prompt_with_penalties_sends_its_history_with_its_last_chunk_in_a_mixed_step() -> None:
    simulation = chunked()
    simulation.add(make_request("row", 5, 9))
    simulation.step()
    simulation.add(make_request("penal", 25, 3, presence_penalty=0.5))
    simulation.finish()
    mixed = [step for step in simulation.steps if step.kind is StepKind.MIXED]
    assert [[history.index for history in step.histories] for step in mixed] == [[], [1]]


def test_decode_first_starts_prompts_when_no_sequence_can_decode() -> None:
    simulation = Simulation(make_limits(policy=Policy.DECODE_FIRST, decode_steps_ahead=0, max_num_seqs=2))
    simulation.add(make_request("a", 5, 6))
    simulation.step()
    simulation.add(make_request("b", 5, 2))
    simulation.finish()
    kinds = [simulation.steps[seq].kind for seq in simulation.device.ran]
    assert kinds == [StepKind.PREFILL, *[StepKind.DECODE] * 5, StepKind.PREFILL, StepKind.DECODE]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_decode_first_limits_the_waiting_time_of_a_prompt(ahead: int) -> None:
    simulation = Simulation(
        make_limits(policy=Policy.DECODE_FIRST, decode_steps_ahead=ahead, max_num_seqs=2, num_blocks=200,
                    max_model_len=300)
    )  # fmt: skip
    simulation.add(make_request("a", 5, 200))
    simulation.step()
    simulation.add(make_request("b", 5, 2))
    simulation.finish()
    ran = [simulation.steps[seq] for seq in simulation.device.ran]
    start = next(place for place, step in enumerate(ran) if step.requests[0].request_id == "b")
    assert ran[start].reason is StepReason.PROMPT_OVERDUE
    assert DECODE_STREAK_LIMIT <= start <= DECODE_STREAK_LIMIT + 2 * ahead + 2


def test_under_decode_first_many_waiting_prompts_start_sooner() -> None:
    simulation = Simulation(make_limits(policy=Policy.DECODE_FIRST, decode_steps_ahead=0, max_num_seqs=8,
                                        prefill_batch_size=1, num_blocks=600, max_model_len=300))  # fmt: skip
    simulation.add(make_request("a", 5, 200))
    simulation.step()
    simulation.add(*(make_request(f"b{index}", 5, 200) for index in range(7)))
    simulation.finish()
    ran = [simulation.steps[seq] for seq in simulation.device.ran]
    prefills = [place for place, step in enumerate(ran) if step.kind is StepKind.PREFILL]
    between = [later - earlier - 1 for earlier, later in pairwise(prefills)]
    assert between == [4, 5, 6, 8, 10, 16, 32]
