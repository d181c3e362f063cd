"""Tests the scheduler's snapshot. A restored scheduler makes the same decisions as the saved one."""

from __future__ import annotations

import random

import msgspec
import pytest

from llm_serving.flight.format import FlightRecordingError
from llm_serving.flight.requests import TokenNames
from llm_serving.flight.state import RecordingCodec, ReplayCodec, first_difference, restore_state
from llm_serving.scheduler.limits import AdmissionKind, BatchingStrategy, Policy, PreemptionKind
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits, make_request
from support.simulation import Simulation


def through_bytes(state):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


def busy_simulation(**limits):
    """Returns a simulation with running, waiting and preempted requests, and steps in flight."""
    rng = random.Random(11)
    simulation = Simulation(make_limits(**{"num_blocks": 24, "num_host_blocks": 20, **limits}))
    for number in range(40):
        request = make_request(f"r{number}", rng.randint(1, 40), rng.randint(1, 20))
        request.priority, request.tenant = rng.choice((0, 0, 1)), rng.choice("ab")
        simulation.add(request)
    for _ in range(60):
        simulation.step()
    assert simulation.scheduler.figures.running
    return simulation


LIMITS = [
    *({"policy": policy, "preemption": kind} for policy in Policy for kind in PreemptionKind),
    *({"admission": kind, "predict_output_length": True} for kind in AdmissionKind),
    *({"batching": mode, "batch_size": 4} for mode in BatchingStrategy),
    {"page_attention": False, "num_host_blocks": 0},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_restored_scheduler_makes_the_same_decisions(limits):
    simulation = busy_simulation(**limits)
    state = through_bytes(simulation.scheduler.snapshot(RecordingCodec(None)))
    copy = Scheduler(simulation.scheduler.limits)
    assert restore_state(copy, through_bytes(state), ReplayCodec(keeps_tokens=False)) == 0
    assert first_difference(state, copy.snapshot(ReplayCodec(keeps_tokens=False))) is None
    copy.check_integrity()
    while not simulation.scheduler.is_idle:
        while (step := simulation.scheduler.schedule(simulation.now)) is not None:
            simulation.device.submit(step)
            assert _decisions(copy.schedule(simulation.now)) == _decisions(step)
        assert copy.schedule(simulation.now) is None
        result = simulation.device.run_next()
        simulation.scheduler.update(result, simulation.now)
        simulation.device.answered(result.seq)
        # The values of the tokens do not matter; -1 stands for no token.
        result.sampled_ids = [min(token, 0) for token in result.sampled_ids]
        copy.update(result, simulation.now)
    assert copy.is_idle
    copy.check_integrity()


def _decisions(step):
    return step.seq, step.kind, step.rows, step.starts, step.query_lens, step.block_tables, step.moves


def test_a_restored_scheduler_waits_for_the_same_states_of_linear_attention():
    """Request b waits for the state that the prompt of request a will save. The restored scheduler must know this,
    although the snapshot contains no hashes of tokens.
    """
    states = {"prefix_cache": True, "num_state_snapshots": 4, "decode_steps_ahead": 0}
    limits = make_limits(**states, policy=Policy.CHUNKED, max_num_batched_tokens=12)
    simulation, names = Simulation(limits), TokenNames()
    prompt = [2 + 5 * place % 50 for place in range(33)]
    for name in "ab":
        request = make_request(name, prompt, 3)
        names.add(request)
        simulation.add(request)
    simulation.step()
    assert [request.num_computed_tokens for request in simulation.requests.values()] == [12, 0]
    state = through_bytes(simulation.scheduler.snapshot(RecordingCodec(names)))
    chain = simulation.scheduler.sequences()[0].prefix_chain
    assert chain.hash_at(7) not in msgspec.msgpack.encode(state)
    copy = Scheduler(simulation.scheduler.limits)
    assert restore_state(copy, state, ReplayCodec(keeps_tokens=True)) == 0
    for _ in range(2):
        step = simulation.scheduler.schedule(simulation.now)
        assert [request.request_id for request in step.requests] == ["a"], "the last step has space for tokens of b"
        simulation.device.submit(step)
        assert _decisions(copy.schedule(simulation.now)) == _decisions(step)
        result = simulation.device.run_next()
        simulation.scheduler.update(result, simulation.now)
        copy.update(result, simulation.now)


def test_a_snapshot_contains_no_token():
    simulation = busy_simulation()
    tokens = {token for request in simulation.requests.values() for token in request.prompt_token_ids}
    assert tokens
    saved = simulation.scheduler.snapshot(RecordingCodec(None))["sequences"]
    assert [each["request"][3] for each in saved] == [None] * len(saved)


def test_a_snapshot_does_not_change_with_the_scheduler():
    simulation = busy_simulation()
    state = simulation.scheduler.snapshot(RecordingCodec(None))
    before = msgspec.msgpack.encode(state)
    simulation.finish()
    assert msgspec.msgpack.encode(state) == before


def test_the_first_difference_names_its_place():
    state = through_bytes(busy_simulation().scheduler.snapshot(RecordingCodec(None)))
    other = through_bytes(state)
    other["parts"]["state"]["running"]["_free_rows"].append(99)
    path, *_ = first_difference(state, other)
    assert path == "parts.state.running._free_rows"
    assert first_difference(state, through_bytes(state)) is None


def test_a_state_of_another_version_is_refused():
    simulation = busy_simulation()
    state = through_bytes(simulation.scheduler.snapshot(RecordingCodec(None)))
    del state["parts"]["policy"]
    with pytest.raises(FlightRecordingError, match=r"KeyError.*Replay it with the version that recorded it"):
        restore_state(Scheduler(simulation.scheduler.limits), state, ReplayCodec(keeps_tokens=False))
