"""Tests deadlines, which drop requests before their prefill.

Also tests receipts, which add up and name the requests that blocked a request.
"""

from __future__ import annotations

import pytest

from llm_serving.request import FinishReason
from llm_serving.scheduler.limits import AdmissionKind, Policy
from llm_serving.telemetry.receipt import BlockReason, Phase
from support.fakes import make_limits, make_request
from support.recorded import RecordProperty
from support.simulation import Simulation


def test_an_expired_request_is_dropped_without_prefill(record_property: RecordProperty) -> None:
    simulation = Simulation(make_limits(max_num_seqs=1, decode_steps_ahead=0))
    simulation.add(make_request("a", 5, 4), make_request("b", 5, 4, deadline=0.5))
    simulation.step()
    assert simulation.scheduler.next_wakeup(0.0) == 0.5
    simulation.now = 0.5
    simulation.schedule()
    assert simulation.ended == {"b": FinishReason.ABORT}
    simulation.finish()
    lengths = [
        (request.request_id, length)
        for step in simulation.steps
        for request, length in zip(step.requests, step.query_lens, strict=True)
    ]
    wasted = sum(length for name, length in lengths if name in simulation.expired)
    record_property("expired_percent", 100 * wasted / sum(length for _, length in lengths))
    assert {name for name, _ in lengths} == {"a"}


def test_a_running_request_continues_past_its_deadline() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request("a", 5, 8, deadline=0.5))
    simulation.step()
    simulation.now = 1.0
    simulation.finish()
    assert simulation.ended == {"a": FinishReason.LENGTH}


def test_the_last_update_has_the_waiting_time() -> None:
    simulation = Simulation(make_limits(max_num_seqs=1))
    simulation.add(make_request("a", 5, 30), make_request("b", 5, 4, arrival=0.25, deadline=0.5))
    simulation.scheduler.schedule(0.0)
    simulation.scheduler.schedule(0.75)
    (update,) = simulation.scheduler.take_ended()
    assert update.error == "the request's deadline passed before its first token: it waited for 0.500 s"
    assert simulation.scheduler.take_ended() == []


@pytest.mark.parametrize("policy", Policy)
def test_the_phases_add_up_to_the_total_time(policy: Policy) -> None:
    simulation = Simulation(make_limits(policy=policy, num_blocks=9, max_model_len=33))
    requests = [make_request(name, 9, 20, arrival=0.0) for name in "abc"]
    simulation.add(*requests)
    while not simulation.scheduler.is_idle:
        simulation.now += 0.001
        simulation.step()
    for request in requests:
        receipt = request.receipt
        assert receipt.phase is Phase.DONE
        assert sum(receipt.phase_us) == round((request.finish_time or 0) * 1e6)
        assert receipt.phase_us[Phase.QUEUED] == round((request.first_scheduled_time or 0) * 1e6)
        assert receipt.preemptions == request.num_preemptions
    assert sum(request.receipt.phase_us[Phase.PREEMPTED] > 0 for request in requests) >= 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_num_seqs": 1}, BlockReason.ROWS),
        ({"num_blocks": 9, "max_model_len": 33}, BlockReason.BLOCKS),
        ({"admission": AdmissionKind.ROUTER, "max_total_tokens": 30}, BlockReason.ADMISSION),
    ],
)
def test_a_receipt_names_the_reason_and_the_blocking_requests(changes: dict[str, object], reason: BlockReason) -> None:
    simulation = Simulation(make_limits(**changes))
    first, second = make_request("first", 20, 9), make_request("second", 20, 9)
    simulation.add(first, second)
    simulation.finish()
    assert second.receipt.num_blocked[reason] > 0
    assert second.receipt.blockers == ["first"]


def test_router_admission_starts_the_next_request_after_the_peak() -> None:
    limits = make_limits(admission=AdmissionKind.ROUTER, max_total_tokens=64, prefill_batch_size=4)
    simulation = Simulation(limits)
    simulation.add(*(make_request(name, 10, 20) for name in "abc"))
    simulation.step()
    assert simulation.scheduler.figures.running == 2
    simulation.finish()
    assert simulation.scheduler.figures.preemptions == 0
