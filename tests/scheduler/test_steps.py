"""Tests the exact content of steps in small cases: the fields of a step, batch rows, blocks, and steps that are sent
ahead.
"""

from __future__ import annotations

import pytest

from llm_serving.ipc.shm import LAST_TOKEN
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.output import History, StepKind
from support.fakes import END_TOKEN, make_limits, make_request, next_token
from support.simulation import Simulation


def test_one_request_from_prompt_to_end() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=0))
    request = make_request("a", [7, 8, 9, 10, 11], 3)
    simulation.add(request)
    first, second, third = (next_token([7, 8, 9, 10, 11], 5, request.sampling), 0, 0)
    second = next_token([7, 8, 9, 10, 11, first], 5, request.sampling)
    third = next_token([7, 8, 9, 10, 11, first, second], 5, request.sampling)

    (prefill,) = simulation.schedule()
    assert (prefill.seq, prefill.kind) == (0, StepKind.PREFILL)
    assert prefill.requests == [request]
    assert prefill.rows == [0]
    assert prefill.token_ids == [7, 8, 9, 10, 11]
    assert (prefill.query_lens, prefill.starts) == ([5], [0])
    assert prefill.block_tables == [[1, 2]]
    assert (prefill.do_sample, prefill.sample_positions) == ([True], [0])
    assert prefill.histories == []
    assert request.status is RequestStatus.RUNNING

    (update,) = simulation.answer()
    assert (update.request, update.token_id, update.index) == (request, first, 0)

    (decode,) = simulation.schedule()
    assert (decode.seq, decode.kind) == (1, StepKind.DECODE)
    assert (decode.token_ids, decode.query_lens, decode.starts) == ([first], [1], [5])
    assert decode.block_tables == [[1, 2]]
    assert (decode.do_sample, decode.sample_positions) == ([True], [1])
    simulation.answer()

    (decode,) = simulation.schedule()
    assert (decode.token_ids, decode.starts, decode.sample_positions) == ([second], [6], [2])
    (update,) = simulation.answer()
    assert update.request.is_finished
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [first, second, third]
    assert simulation.schedule() == []
    simulation.check_quiet()


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_decode_steps_ahead_are_queued_behind_the_running_one(ahead: int) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=ahead))
    simulation.add(make_request("a", 5, 20))
    simulation.schedule()
    simulation.answer()
    for step in range(8):
        simulation.schedule()
        assert simulation.scheduler.figures.steps_in_flight == ahead + 1
        seqs = [slot.seq for slot in simulation.device.queue]
        assert seqs == list(range(1 + step, 2 + step + ahead))
        simulation.answer()


def test_a_step_ahead_refers_to_a_token_that_only_the_agent_knows() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=2))
    simulation.add(make_request("a", 5, 20))
    prefill, decode, second = simulation.schedule()
    assert (decode.kind, decode.token_ids, decode.starts, decode.sample_positions) == (
        StepKind.DECODE,
        [LAST_TOKEN],
        [5],
        [1],
    )
    assert (second.token_ids, second.starts, second.sample_positions) == ([LAST_TOKEN], [6], [2])
    assert prefill.num_tokens == 5


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_nothing_is_scheduled_past_max_tokens(ahead: int, max_tokens: int) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=ahead))
    simulation.add(make_request("a", 5, max_tokens))
    simulation.finish()
    assert len(simulation.steps) == max_tokens


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_nothing_is_scheduled_past_the_context(ahead: int) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=ahead, max_model_len=10, max_prompt_len=10))
    simulation.add(make_request("a", 5, 100))
    simulation.finish()
    assert len(simulation.steps) == 5
    assert max(start for step in simulation.steps for start in step.starts) == 8


def request_that_ends() -> tuple[Request, int]:
    """Returns a request whose output has an early end token, and the number of tokens before that token."""
    for seed in range(1000):
        request = make_request("ends", 5, 40, seed=seed, ignore_eos=False)
        tokens = list(request.prompt_token_ids)
        for count in range(1, 8):
            tokens.append(next_token(tokens, 5, request.sampling))
            if tokens[-1] == END_TOKEN:
                if count < 4:
                    break
                return request, count
    raise AssertionError


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_tokens_after_an_unexpected_end_are_dropped(ahead: int) -> None:
    request, count = request_that_ends()
    simulation = Simulation(make_limits(decode_steps_ahead=ahead))
    simulation.add(request)
    simulation.finish()
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids[-1] == END_TOKEN
    assert len(request.output_token_ids) == count
    assert len(simulation.steps) == count + ahead


def test_blocks_stay_until_the_steps_ahead_complete() -> None:
    request, count = request_that_ends()
    simulation = Simulation(make_limits(decode_steps_ahead=2))
    simulation.add(request)
    while not request.is_finished:
        simulation.step()
    scheduler = simulation.scheduler
    assert scheduler.figures.steps_in_flight == 2
    assert (scheduler.figures.running, scheduler.figures.waiting) == (0, 0)
    assert scheduler.figures.total_blocks - scheduler.figures.free_blocks == -(-(5 + count + 1) // 4)
    simulation.answer()
    assert scheduler.figures.free_blocks < scheduler.figures.total_blocks
    simulation.answer()
    assert scheduler.figures.free_blocks == scheduler.figures.total_blocks
    assert scheduler.is_idle


def test_ignore_eos_continues_and_stop_token_ids_end() -> None:
    request, _ = request_that_ends()
    seed = request.sampling.seed
    tokens = list(request.prompt_token_ids)
    for _ in range(2):
        tokens.append(next_token(tokens, 5, request.sampling))
    goes_on = make_request("ends", 5, 12, seed=seed, ignore_eos=True)
    goes_on.request_id = "goes on"
    stops = make_request("ends", 5, 12, seed=seed, ignore_eos=True, stop_token_ids=frozenset({tokens[-1]}))
    simulation = Simulation(make_limits())
    simulation.add(goes_on, stops)
    updates = []
    while not simulation.scheduler.is_idle:
        updates += simulation.step()
    assert len(goes_on.output_token_ids) == 12
    assert stops.finish_reason is FinishReason.STOP
    assert stops.output_token_ids[-1] == tokens[-1]
    (last,) = [
        update for update in updates if update.request is stops and stops.output_token_ids and update.stop_token_id
    ]
    assert last.stop_token_id == tokens[-1]


def test_prefill_steps_take_prompts_in_order() -> None:
    simulation = Simulation(make_limits(prefill_batch_size=3, max_num_batched_tokens=20, num_blocks=100))
    simulation.add(*(make_request(name, length) for name, length in zip("abcde", (8, 8, 8, 3, 3), strict=True)))
    first, second = simulation.schedule()[:2]
    assert [request.request_id for request in first.requests] == ["a", "b"]
    assert [request.request_id for request in second.requests] == ["c", "d", "e"]
    assert second.query_lens == [8, 3, 3]
    assert second.rows == [2, 3, 4]
    assert second.block_tables == [[5, 6], [7], [8]]
    assert len(second.token_ids) == 14


def test_a_big_request_is_not_overtaken() -> None:
    simulation = Simulation(make_limits(num_blocks=17, max_num_seqs=4))
    simulation.add(make_request("a", 40, 4), make_request("b", 40, 4), make_request("c", 1, 1))
    (step, *_) = simulation.schedule()
    assert [request.request_id for request in step.requests] == ["a"]
    assert simulation.scheduler.figures.waiting == 2
    simulation.finish()


def test_no_more_than_two_prefill_steps_are_in_flight() -> None:
    simulation = Simulation(make_limits(prefill_batch_size=1))
    simulation.add(*(make_request(name) for name in "abcd"))
    kinds = [step.kind for step in simulation.schedule()]
    assert kinds == [StepKind.PREFILL, StepKind.PREFILL]
    simulation.answer()
    assert [step.kind for step in simulation.schedule()] == [StepKind.PREFILL]


def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks_and_sampled_once() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=10, prefill_batch_size=4, decode_steps_ahead=0))
    long, short = make_request("long", 25, 2), make_request("short", 3, 2)
    simulation.add(long, short)
    first, second = simulation.schedule()
    assert (first.query_lens, first.starts, first.do_sample) == ([10], [0], [False])
    assert (second.query_lens, second.starts, second.do_sample) == ([10], [10], [False])
    assert first.block_tables[0] is second.block_tables[0]
    assert len(first.block_tables[0]) == 7
    assert simulation.answer() == []
    (third,) = simulation.schedule()
    assert third.requests == [long, short]
    assert (third.query_lens, third.starts, third.do_sample) == ([5, 3], [20, 0], [True, True])
    simulation.finish()


def test_penalties_send_the_history_with_the_step_that_samples_first() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=0))
    plain, penal = make_request("plain", [3, 4], 3), make_request("penal", [5, 6, 7], 3, repetition_penalty=1.3)
    simulation.add(plain, penal)
    (prefill,) = simulation.schedule()
    assert prefill.histories == [History(1, [5, 6, 7], 3)]
    simulation.answer()
    (decode,) = simulation.schedule()
    assert decode.histories == []
    simulation.lose_agent()
    # After the loss of the agent, each sequence first runs alone. The step with a history is the one of ``penal``.
    while not (again := simulation.schedule()[0]).histories:
        simulation.answer()
    assert again.histories == [History(0, [5, 6, 7, *penal.output_token_ids], 3)]
    assert again.sample_positions == [1]
    simulation.finish()


def test_a_history_longer_than_a_step_is_sent_with_the_last_chunk_only() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=10, prefill_batch_size=4))
    request = make_request("penal", 25, 2, presence_penalty=0.5)
    simulation.add(request, make_request("other", 3, 2))
    simulation.finish()
    prefills = [step for step in simulation.steps if step.kind is StepKind.PREFILL]
    assert [step.query_lens for step in prefills] == [[10], [10], [5, 3]]
    assert [len(step.histories) for step in prefills] == [0, 0, 1]
    assert prefills[2].histories[0].token_ids == list(request.prompt_token_ids)


def test_sequences_beyond_the_size_of_a_decode_step_alternate() -> None:
    simulation = Simulation(make_limits(max_num_seqs=6, decode_batch_size=4, prefill_batch_size=6, num_blocks=100))
    simulation.add(*(make_request(name, 5, 9) for name in "abcdef"))
    simulation.finish()
    decodes = [step for step in simulation.steps if step.kind is StepKind.DECODE]
    assert [step.num_seqs for step in decodes] == [4] * 12
    assert [step.rows for step in decodes[:3]] == [[0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 4, 5]]
