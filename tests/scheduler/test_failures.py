"""Tests aborts, failed and dropped steps, lost agents, and wrong results."""

from __future__ import annotations

import pytest

from llm_serving.errors import ProtocolError
from llm_serving.request import FinishReason, RequestStatus
from llm_serving.scheduler.output import StepKind, StepResult
from llm_serving.telemetry.receipt import Phase
from support.fakes import make_limits, make_request
from support.recorded import RecordProperty
from support.simulation import Simulation


def test_abort_while_waiting(record_property: RecordProperty) -> None:
    simulation = Simulation(make_limits(max_num_seqs=1))
    simulation.add(make_request("a"), make_request("b"))
    simulation.schedule()
    simulation.end("b")
    simulation.finish()
    record_property("lost_blocks", f"{simulation.num_held_blocks} of 1")
    assert simulation.ended == {"a": FinishReason.LENGTH, "b": FinishReason.ABORT}
    assert simulation.streams["b"] == []


def test_abort_without_a_step_in_flight_frees_blocks_immediately(record_property: RecordProperty) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=0))
    simulation.add(make_request("a"))
    simulation.step()
    assert simulation.scheduler.figures.free_blocks == simulation.scheduler.figures.total_blocks - 2
    simulation.end("a")
    record_property("lost_blocks", f"{simulation.num_held_blocks} of 1")
    assert simulation.num_held_blocks == 0
    simulation.check_quiet()


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_abort_frees_blocks_when_the_steps_that_use_them_complete(ahead: int, record_property: RecordProperty) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=ahead, num_blocks=100))
    gone, stays = make_request("gone", 5, 50), make_request("stays", 5, 50)
    simulation.add(gone, stays)
    for _ in range(4):
        simulation.step()
    simulation.schedule()
    row = gone.row
    simulation.end("gone")
    assert (simulation.scheduler.figures.running, simulation.scheduler.figures.waiting) == (1, 0)
    for _ in range(ahead + 1):
        assert gone.row == row
        simulation.step()
    assert gone.row == -1
    assert all(gone not in step.requests for step in simulation.steps[5 + ahead :])
    simulation.finish()
    record_property("lost_blocks", f"{simulation.num_held_blocks} of 1")


def test_abort_during_the_only_prefill_makes_its_steps_void(record_property: RecordProperty) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=1))
    simulation.add(make_request("a", 40, 8))
    assert [step.kind for step in simulation.schedule()] == [StepKind.PREFILL, StepKind.DECODE]
    assert simulation.scheduler.void_steps() == []
    simulation.end("a")
    assert simulation.scheduler.void_steps() == [1, 0]
    simulation.drop_void_steps()
    assert simulation.device.queue == []
    assert simulation.answer() == []
    assert simulation.answer() == []
    record_property("lost_blocks", f"{simulation.num_held_blocks} of 1")
    simulation.check_quiet()


def test_a_step_is_not_dropped_if_a_later_step_needs_its_state() -> None:
    """The prefill of an aborted request is not dropped, because a later decode step contains its batch row.

    Without the prefill, the decode step would read a batch row that was never filled.
    """
    simulation = Simulation(make_limits(decode_steps_ahead=1, prefill_batch_size=1))
    simulation.add(make_request("a"), make_request("b"))
    simulation.schedule()
    simulation.answer()
    (decode,) = simulation.schedule()
    assert decode.num_seqs == 2
    simulation.end("b")
    assert simulation.scheduler.void_steps() == []
    simulation.finish()


def test_abort_of_an_unknown_request_does_nothing() -> None:
    assert Simulation(make_limits()).scheduler.finish_request("nobody", FinishReason.ABORT, 0.0) is None


def test_a_failed_step_ends_only_its_own_requests() -> None:
    simulation = Simulation(make_limits(prefill_batch_size=2, num_blocks=60))
    simulation.add(make_request("a"), make_request("b"))
    simulation.step()
    simulation.add(make_request("c"), make_request("d"))
    simulation.schedule()
    updates = simulation.fail_step("the kernel said no")
    assert [(update.request.request_id, update.error) for update in updates] == [
        ("c", "the kernel said no"),
        ("d", "the kernel said no"),
    ]
    simulation.finish()
    assert simulation.ended == {
        "a": FinishReason.LENGTH,
        "b": FinishReason.LENGTH,
        "c": FinishReason.ERROR,
        "d": FinishReason.ERROR,
    }


def test_tokens_of_steps_behind_a_failed_one_are_dropped() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=3))
    simulation.add(make_request("a", 5, 20))
    simulation.schedule()
    simulation.fail_step("no")
    assert simulation.scheduler.figures.steps_in_flight == 3
    simulation.finish()
    assert simulation.streams["a"] == []


def test_a_dropped_step_of_a_running_request_is_repeated() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=2))
    simulation.add(make_request("a", 5, 20), make_request("b", 5, 20))
    for _ in range(3):
        simulation.step()
    simulation.schedule()
    dropped = simulation.device.queue[0].seq
    result = simulation.device.abort(dropped)
    assert result is not None
    simulation.answers.append(result)
    assert simulation.answer() == []
    assert (simulation.scheduler.figures.running, simulation.scheduler.figures.waiting) == (0, 2)
    simulation.finish()
    assert set(simulation.ended.values()) == {FinishReason.LENGTH}


def test_prefixes_behind_a_dropped_step_are_not_cached() -> None:
    """The last chunk of a prompt runs, but the agent has dropped the second one, whose blocks are therefore empty."""
    simulation = Simulation(make_limits(prefix_cache=True, max_num_batched_tokens=8))
    request = make_request("a", 24, 4)
    simulation.add(request)
    simulation.step()
    simulation.schedule()
    second, third = simulation.device.queue[:2]
    assert (second.starts, third.starts) == ([8], [16])
    result = simulation.device.abort(second.seq)
    assert result is not None
    simulation.answers.append(result)
    simulation.finish()
    assert simulation.ended == {"a": FinishReason.LENGTH}


def test_a_new_request_does_not_overtake_a_restarted_one() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=2, num_blocks=100))
    simulation.add(make_request("a", 5, 20), make_request("b", 5, 20))
    simulation.step()
    result = simulation.device.abort(simulation.device.queue[0].seq)
    assert result is not None
    simulation.answers.append(result)
    simulation.answer()
    simulation.add(make_request("c", 5, 20))
    first = len(simulation.steps)
    simulation.finish()
    assert (
        "".join(request.request_id for step in simulation.steps[first : first + 2] for request in step.requests)
        == "abc"
    )


def test_a_restarted_sequence_keeps_its_order_of_arrival() -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=0, decode_batch_size=1, num_blocks=100))
    simulation.add(make_request("a", 5, 20), make_request("b", 5, 20))
    simulation.step()
    (decode,) = simulation.schedule()
    assert decode.rows == [0]
    result = simulation.device.abort(decode.seq)
    assert result is not None
    simulation.answers.append(result)
    simulation.answer()
    simulation.step()
    assert [sequence.request.request_id for sequence in simulation.scheduler._running] == ["a", "b"]
    simulation.finish()


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_no_token_is_lost_with_an_agent(ahead: int) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=ahead, num_blocks=60))
    requests = [make_request(name, 7, 12, ignore_eos=False) for name in "abcdef"]
    simulation.add(*requests)
    for _ in range(4):
        for _ in range(3):
            simulation.step()
        simulation.schedule()
        simulation.lose_agent()
        assert simulation.scheduler.figures.waiting == sum(not request.is_finished for request in requests)
        assert {request.status for request in requests} <= {RequestStatus.WAITING, RequestStatus.FINISHED}
    simulation.finish()
    assert all(request.num_preemptions == 0 for request in requests)


def test_a_lost_agent_frees_leaving_sequences() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request("a"), make_request("b"))
    simulation.schedule()
    simulation.end("a")
    assert simulation.scheduler.figures.free_blocks < simulation.scheduler.figures.total_blocks
    simulation.lose_agent()
    simulation.finish()
    assert simulation.ended == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}


def test_requests_start_again_in_order_of_arrival_after_a_loss() -> None:
    simulation = Simulation(make_limits(prefill_batch_size=1, num_blocks=100))
    simulation.add(*(make_request(name) for name in "abc"))
    for _ in range(5):
        simulation.step()
    simulation.add(make_request("d"))
    simulation.lose_agent()
    first = len(simulation.steps)
    simulation.finish()
    prefills = [step for step in simulation.steps[first:] if step.kind is StepKind.PREFILL]
    assert [step.requests[0].request_id for step in prefills] == ["a", "b", "c", "d"]


def test_a_restart_after_a_loss_is_no_preemption() -> None:
    simulation = Simulation(make_limits(num_blocks=100))
    request = make_request("a")
    simulation.add(request)
    for _ in range(5):
        simulation.step()
    simulation.now = 1.0
    simulation.lose_agent()
    assert request.receipt.phase is Phase.RESTARTED
    simulation.now = 11.0
    simulation.finish()
    assert request.receipt.phase_us[Phase.RESTARTED] == 10_000_000
    assert request.receipt.phase_us[Phase.PREEMPTED] == 0
    assert (request.receipt.preemptions, request.num_preemptions) == (0, 0)


def test_a_result_after_the_loss_is_refused() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request("a"))
    simulation.schedule()
    simulation.run()
    late = simulation.answers[0]
    simulation.lose_agent()
    with pytest.raises(ProtocolError, match="step 0 has a result but is not in flight"):
        simulation.scheduler.update(late, 0.0)
    simulation.finish()


def test_fail_all_ends_every_request() -> None:
    simulation = Simulation(make_limits(max_num_seqs=2))
    simulation.add(*(make_request(name) for name in "abcd"))
    simulation.step()
    updates = simulation.scheduler.fail_all("the end", 1.0)
    assert {update.error for update in updates} == {"the end"}
    simulation.cut.update("abcd")
    simulation.take(updates)
    assert set(simulation.ended.values()) == {FinishReason.ERROR}
    simulation.finish()


@pytest.mark.parametrize(
    "answer",
    [
        StepResult(0),
        StepResult(0, [3], [0.0], [0.0]),
        StepResult(0, [3, 4], [0.0], [0.0, 0.0]),
        StepResult(0, [3, -1], [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_a_result_of_the_wrong_shape_ends_the_requests_of_its_step(answer: StepResult) -> None:
    simulation = Simulation(make_limits(decode_steps_ahead=0))
    simulation.add(make_request("a"), make_request("b"))
    simulation.schedule()
    updates = simulation.update(answer)
    assert [update.request.finish_reason for update in updates] == [FinishReason.ERROR] * 2
    assert updates[0].error is not None
    assert updates[0].error.startswith("step 0 ")
    assert simulation.scheduler.is_idle
    simulation.check()


def test_the_integrity_check_finds_a_leak() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request("a"))
    simulation.schedule()
    simulation.scheduler._kv_cache._pool.allocate(1)
    with pytest.raises(AssertionError, match="are not 32 in total"):
        simulation.scheduler.check_integrity()
