"""Tests which requests run together if a batch may have only one LoRA adapter, and if it may have several."""

from __future__ import annotations

from llm_serving.request import Request
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import FakeDevice, make_limits, make_request

ADAPTERS = [-1, 0, 0, 1, -1, 0]


def batches(scheduler: Scheduler, requests: list[Request]) -> list[set[int]]:
    """Runs all requests to their end. Returns the adapter slots in each step."""
    device, found = FakeDevice(scheduler.limits), []
    for request in requests:
        scheduler.add_request(request)
    for now in range(1000):
        step = scheduler.schedule(float(now))
        if step is None:
            break
        found.append({request.adapter_slot for request in step.requests})
        device.submit(step)
        result = device.run_next()
        scheduler.update(result, float(now))
        device.answered(result.seq)
    assert all(request.is_finished for request in requests)
    return found


def requests() -> list[Request]:
    made = [make_request(f"r{index}", 5, 4, arrival=index * 1e-3) for index in range(len(ADAPTERS))]
    for request, slot in zip(made, ADAPTERS, strict=True):
        request.adapter_slot = slot
    return made


def test_a_split_batch_has_one_adapter_and_every_request_has_its_turn() -> None:
    found = batches(Scheduler(make_limits(splits_adapters=True)), requests())
    assert all(len(slots) == 1 for slots in found)
    turns = [next(iter(slots)) for slots in found]
    changes = [turn for turn, before in zip(turns, [None, *turns], strict=False) if turn != before]
    assert changes == [-1, 0, 1, -1, 0]


def test_a_mixed_batch_has_all_adapters() -> None:
    found = batches(Scheduler(make_limits()), requests())
    assert {-1, 0, 1} in found
