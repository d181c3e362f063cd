"""Tests preemption by swap, combined with steps in flight, aborts, failures and a small host pool."""

from __future__ import annotations

import pytest

from llm_serving.block_moves.swapping import PreemptionChoice
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.limits import Policy, PreemptionKind
from llm_serving.scheduler.output import MoveKind, StepKind, StepReason, StepResult
from llm_serving.scheduler.sequence import Sequence
from llm_serving.telemetry.receipt import Phase
from support.fakes import make_limits, make_request
from support.simulation import Simulation


def swapping(**changes: object) -> Simulation:
    values: dict[str, object] = {
        "num_blocks": 9,
        "max_model_len": 33,
        "preemption": PreemptionKind.SWAP,
        "num_host_blocks": 32,
        "decode_steps_ahead": 1,
    }
    return Simulation(make_limits(**{**values, **changes}))


def crowd(simulation: Simulation) -> tuple[Request, Request]:
    old, young = make_request("old", 9, 20), make_request("young", 9, 20)
    simulation.add(old, young)
    return old, young


def run_until(simulation: Simulation, request: Request, status: RequestStatus) -> None:
    for _ in range(300):
        simulation.schedule()
        if request.status is status:
            return
        simulation.answer()
    raise AssertionError(f"{request.request_id} was never {status}")


def moves(simulation: Simulation, kind: MoveKind) -> list[int]:
    """Returns the number of moved blocks in each MOVE step of this kind."""
    return [len(s.moves) for s in simulation.steps if s.kind is StepKind.MOVE and s.moves[0].kind is kind]


def test_a_swapped_sequence_is_not_computed_again() -> None:
    simulation = swapping()
    old, young = crowd(simulation)
    simulation.finish()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert (simulation.scheduler.figures.swaps, simulation.scheduler.figures.preemptions) == (1, 1)
    assert moves(simulation, MoveKind.SWAP_OUT) == moves(simulation, MoveKind.SWAP_IN) == [4]
    assert [step.starts for step in simulation.steps if step.kind is StepKind.PREFILL] == [[0, 0]]
    reasons = [step.reason for step in simulation.steps if step.kind is StepKind.MOVE]
    assert reasons == [StepReason.SWAP_OUT, StepReason.SWAP_IN]


def test_a_decode_step_restarts_the_batch_row_of_a_swapped_sequence() -> None:
    simulation = swapping()
    _, young = crowd(simulation)
    run_until(simulation, young, RequestStatus.SWAPPED)
    assert (simulation.scheduler.figures.swapped, simulation.scheduler.figures.waiting) == (1, 0)
    assert young.row == -1
    last = young.output_token_ids[-1]
    simulation.finish()
    back = next(s for s in simulation.steps if s.kind is StepKind.DECODE and any(s.restarts))
    assert back.requests == [young]
    assert back.token_ids == [last]
    assert back.histories == []


def test_with_penalties_that_decode_step_has_the_history() -> None:
    simulation = swapping()
    old, young = make_request("old", 9, 20), make_request("young", 9, 20, frequency_penalty=0.5)
    simulation.add(old, young)
    run_until(simulation, young, RequestStatus.SWAPPED)
    known = [*young.prompt_token_ids, *young.output_token_ids]
    simulation.finish()
    back = next(s for s in simulation.steps if s.kind is StepKind.DECODE and any(s.restarts))
    assert [history.token_ids for history in back.histories] == [known]


def test_histories_beyond_the_capacity_of_a_decode_step_wait_for_the_next() -> None:
    simulation = swapping(
        num_blocks=19, block_size=3, max_model_len=40, max_num_batched_tokens=16, decode_steps_ahead=0
    )
    first = make_request("a", 2, 27)
    second, third = make_request("b", 1, 26, presence_penalty=0.5), make_request("c", 5, 16, presence_penalty=0.5)
    simulation.add(first, second, third)
    simulation.finish()
    back = [step for step in simulation.steps if step.kind is StepKind.DECODE and True in step.restarts]
    histories = [(step.requests[h.index].request_id, len(h.token_ids)) for step in back for h in step.histories]
    assert simulation.limits.max_step_history == 40
    assert histories == [("b", 26), ("c", 20)]
    assert back[1].seq == back[0].seq + 1


def test_a_swapped_sequence_returns_before_a_new_request_starts() -> None:
    simulation = swapping()
    _, young = crowd(simulation)
    run_until(simulation, young, RequestStatus.SWAPPED)
    simulation.add(make_request("new", 1, 1))
    simulation.finish()
    back = next(s.seq for s in simulation.steps if s.kind is StepKind.MOVE and s.moves[0].kind is MoveKind.SWAP_IN)
    started = next(s.seq for s in simulation.steps if s.requests and s.requests[0].request_id == "new")
    assert back < started


def test_the_receipt_has_the_time_on_the_host() -> None:
    simulation = swapping()
    _, young = crowd(simulation)
    run_until(simulation, young, RequestStatus.SWAPPED)
    assert young.receipt.phase is Phase.SWAPPED
    assert (young.receipt.swaps, young.receipt.preemptions) == (1, 0)
    run_until(simulation, young, RequestStatus.RUNNING)
    assert young.receipt.phase is Phase.SWAPPED
    simulation.finish()
    assert young.receipt.phase is Phase.DONE


@pytest.mark.parametrize("num_host_blocks", [0, 1, 3])
def test_without_host_blocks_a_victim_is_recomputed(num_host_blocks: int) -> None:
    simulation = swapping(num_host_blocks=num_host_blocks)
    _, young = crowd(simulation)
    simulation.finish()
    assert (young.num_preemptions, simulation.scheduler.figures.swaps) == (1, 0)
    assert moves(simulation, MoveKind.SWAP_OUT) == []


@pytest.mark.parametrize("when", ["draining", "going out", "away", "coming back"])
@pytest.mark.parametrize("who", ["old", "young"])
def test_swap_and_abort(when: str, who: str) -> None:
    simulation = swapping()
    _, young = crowd(simulation)
    while not young.num_preemptions:
        simulation.schedule()
        if not young.num_preemptions:
            simulation.answer()
    if when == "going out":
        while not moves(simulation, MoveKind.SWAP_OUT):
            simulation.step()
            simulation.schedule()
    elif when == "away":
        run_until(simulation, young, RequestStatus.SWAPPED)
    elif when == "coming back":
        while not moves(simulation, MoveKind.SWAP_IN):
            simulation.step()
            simulation.schedule()
    simulation.end(who)
    simulation.drop_void_steps()
    simulation.finish()
    if not (when == "coming back" and who == "old"):
        assert simulation.ended[who] is FinishReason.ABORT


@pytest.mark.parametrize("kind", [MoveKind.SWAP_OUT, MoveKind.SWAP_IN])
@pytest.mark.parametrize("how", ["fails", "is lost"])
def test_a_move_step_fails(kind: MoveKind, how: str) -> None:
    simulation = swapping()
    _, young = crowd(simulation)
    while not moves(simulation, kind):
        simulation.step()
        simulation.schedule()
    if how == "fails":
        assert simulation.device.queue[-1].kind is StepKind.MOVE
        assert [update.request for update in simulation.fail_step("the copy failed")] == [young]
        assert simulation.ended["young"] is FinishReason.ERROR
    else:
        simulation.lose_agent()
        assert simulation.scheduler.figures.swapped == 0
    simulation.finish()


def test_a_sequence_that_is_swapped_between_its_chunks_continues_after_them() -> None:
    simulation = swapping(
        num_blocks=11, max_num_batched_tokens=4, policy=Policy.FCFS, prefill_batch_size=1, max_model_len=40,
        decode_steps_ahead=0,
    )  # fmt: skip
    old, young = make_request("old", 4, 30), make_request("young", 22, 6)
    simulation.add(old)
    for _ in range(12):
        simulation.step()
    simulation.add(young)
    simulation.finish()
    starts = [s.starts[0] for s in simulation.steps if s.kind is StepKind.PREFILL and young in s.requests]
    assert starts.count(0) == 1
    assert starts == sorted(starts)


def test_a_sequence_that_is_swapped_during_recompute_continues_it() -> None:
    """The sequence is swapped while it recomputes its prompt and output. After the swap, it must first complete the
    recompute.
    """
    simulation = swapping(
        num_blocks=13, max_num_batched_tokens=2, policy=Policy.FCFS, prefill_batch_size=1, decode_steps_ahead=0
    )
    old, young = make_request("old", 2, 22), make_request("young", 15, 12)
    simulation.add(old, young)
    for _ in range(22):
        simulation.step()
    simulation.lose_agent()
    simulation.finish()
    assert (young.num_preemptions, young.receipt.swaps) == (1, 1)
    back = next(step.seq for step in simulation.steps if step.reason is StepReason.SWAP_IN)
    kind, start, query_len = next(
        (step.kind, step.starts[step.requests.index(young)], step.query_lens[step.requests.index(young)])
        for step in simulation.steps[back:]
        if young in step.requests
    )
    assert (kind, start, query_len) == (StepKind.PREFILL, 20, 2)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", Policy)
def test_a_pool_of_one_longest_sequence_serves_any_number(policy: Policy, ahead: int) -> None:
    simulation = swapping(num_blocks=10, max_model_len=37, max_prompt_len=36, policy=policy, decode_steps_ahead=ahead)
    simulation.add(*(make_request(f"r{index}", 1 + index % 12, 36) for index in range(10)))
    simulation.finish()
    assert all(reason is FinishReason.LENGTH for reason in simulation.ended.values())


def test_auto_chooses_the_faster_kind() -> None:
    choice = PreemptionChoice(PreemptionKind.AUTO, block_size=4)
    sequence = Sequence(make_request("a", 40), 0, 8)
    sequence.request.num_computed_tokens = 40
    assert choice.prefers_swap(sequence)  # While no costs are measured, ``auto`` prefers swap to recompute.
    simulation = swapping(preemption=PreemptionKind.AUTO)
    crowd(simulation)
    simulation.finish()
    prefill = next(step for step in simulation.steps if step.kind is StepKind.PREFILL)  # 18 tokens
    move = next(step for step in simulation.steps if step.kind is StepKind.MOVE)  # 4 blocks
    # Recompute costs 1 ms per token, so 40 ms for 40 tokens.
    choice.step_completed(prefill, StepResult(0, graph_us=18_000))
    # Swap costs 1 ms per block, so 20 ms for 10 blocks out and in.
    choice.step_completed(move, StepResult(0, graph_us=4_000))
    assert choice.prefers_swap(sequence)
    # Swap now costs 3 ms per block, so 60 ms for 10 blocks out and in.
    choice.step_completed(move, StepResult(0, graph_us=20_000))
    assert not choice.prefers_swap(sequence)


def preempted_on_its_way_back() -> tuple[Simulation, Request]:
    """Returns a simulation and its request ``c``, which is preempted again while its blocks return from the host."""
    simulation = swapping(
        num_blocks=14, block_size=1, max_model_len=13, max_num_batched_tokens=100, prefill_batch_size=4
    )
    third = make_request("c", 3, 12)
    simulation.add(make_request("a", 1, 6), make_request("b", 2, 9), third)
    while third.num_preemptions < 2:
        simulation.schedule()
        if third.num_preemptions < 2:
            while simulation.device.queue or simulation.answers:
                simulation.answer()
    return simulation, third


def moved(simulation: Simulation) -> list[list[tuple[str, int, int]]]:
    return [[(m.kind.name, m.source, m.destination) for m in s.moves] for s in simulation.steps if s.moves]


def test_a_sequence_preempted_while_it_returns_keeps_its_host_blocks() -> None:
    simulation, third = preempted_on_its_way_back()
    simulation.finish()
    out, back, back_again = moved(simulation)
    assert out == [("SWAP_OUT", block, host) for host, block in enumerate([4, 5, 6, 9, 12])]
    assert back == [("SWAP_IN", host, block) for host, block in enumerate([1, 7, 10, 13, 4])]
    assert [move[:2] for move in back_again] == [move[:2] for move in back]
    assert (third.receipt.swaps, third.receipt.preemptions) == (2, 0)


@pytest.mark.parametrize("how", ["aborted", "failed", "lost"])
def test_a_sequence_preempted_while_it_returns_ends_or_restarts(how: str) -> None:
    simulation, third = preempted_on_its_way_back()
    assert len(simulation.scheduler._kv_cache.host_pool._free) == 32 - 5
    if how == "aborted":
        simulation.end("c")
        # The 5 blocks are not free, because moves in flight read them.
        assert len(simulation.scheduler._kv_cache.host_pool._free) == 32 - 5
    elif how == "failed":
        assert simulation.device.queue[0].moves
        simulation.fail_step("the moves failed")
    else:
        simulation.lose_agent()
        assert len(simulation.scheduler._kv_cache.host_pool._free) == 32
    simulation.finish()
    ends = {"aborted": FinishReason.ABORT, "failed": FinishReason.ERROR, "lost": FinishReason.LENGTH}
    assert third.finish_reason is ends[how]


def test_one_of_two_victims_ends_before_its_blocks_move() -> None:
    """Two sequences are preempted, and one of them ends.

    The last steps of both have completed, but the moves to the host are not scheduled yet.
    """
    simulation = swapping(num_blocks=19, max_num_seqs=6, prefill_batch_size=6, decode_steps_ahead=1)
    requests = [make_request(name, 5, 20) for name in "abcdef"]
    simulation.add(*requests)
    while not simulation.scheduler.figures.preemptions:
        simulation.schedule()
        if not simulation.scheduler.figures.preemptions:
            simulation.answer()
    assert [request.num_preemptions for request in requests] == [0, 0, 0, 0, 1, 1]
    while simulation.answers or simulation.device.queue:
        simulation.answer()
    simulation.end("f")
    (out,) = [step for step in simulation.schedule() if step.moves]
    assert [move.destination for move in out.moves] == simulation.scheduler._running.leaving[0].host_table
    simulation.finish()
    assert simulation.ended["f"] is FinishReason.ABORT
