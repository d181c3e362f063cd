"""Tests that a request that kills its agent fails alone. All other requests complete with the same tokens."""

from __future__ import annotations

import pytest

from llm_serving.errors import AgentLostTwiceError
from llm_serving.executor.base import AgentLost
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.limits import Policy
from support.engine_harness import Engine
from support.fakes import expected_tokens

POLICIES = list(Policy)


def in_flight(engine: Engine) -> set[str]:
    """Returns the ids of the requests whose steps are in flight."""
    return {request.request_id for step in engine.scheduler.steps_in_flight() for request in step.requests}


def run_with_killer(engine: Engine, killer: Request, at: int) -> list[set[str]]:
    """Runs the engine until it is idle. The agent dies each time when it computes token ``at`` of ``killer``.

    Returns for each death the ids of the requests in flight.
    """
    losses = []
    for _ in range(10_000):
        engine.step()
        if engine.scheduler.is_idle:
            return losses
        reached = len(killer.output_token_ids) + killer.num_inflight_tokens > at
        if killer.request_id in in_flight(engine) and reached:
            losses.append(in_flight(engine))
            engine.executor.lose_agent()
    raise AssertionError("it never ended")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("at", [0, 5])
def test_only_the_request_that_kills_its_agent_fails(policy: Policy, ahead: int, at: int) -> None:
    engine = Engine(policy=policy, decode_steps_ahead=ahead)
    others = [engine.request(name, 6, 20) for name in "abc"]
    killer = engine.request("killer", 7, 20)
    others += [engine.request(name, 5, 20) for name in "de"]
    losses = run_with_killer(engine, killer, at)
    assert engine.whole("killer").finish_reason is FinishReason.ERROR
    assert engine.whole("killer").error == AgentLostTwiceError.TEXT
    assert killer.num_losses == 2
    assert losses[-1] == {"killer"}
    for request in others:
        assert engine.whole(request.request_id).token_ids == tuple(expected_tokens(request, 64))
        assert request.num_losses <= 1
    assert engine.scheduler.figures.free_blocks == engine.scheduler.figures.total_blocks


def test_a_suspect_is_alone_until_it_has_passed_the_tokens_that_were_in_flight() -> None:
    engine = Engine(decode_steps_ahead=2)
    requests = [engine.request(name, 6, 30) for name in "ab"]
    for _ in range(6):
        engine.step()
    engine.executor.lose_agent()
    alone = []
    while not alone or any(request.is_suspect for request in requests):
        engine.step()
        alone.append(in_flight(engine))
    assert all(len(each) <= 1 for each in alone[:-1])
    while not engine.scheduler.is_idle:
        engine.step()
        assert not any(request.is_suspect for request in requests)
    assert [engine.whole(name).finish_reason for name in "ab"] == [FinishReason.LENGTH] * 2


def test_a_request_that_loses_its_agent_often_stays_alone() -> None:
    engine = Engine()
    requests = [engine.request(name, 6, 40) for name in "ab"]
    for _ in range(3):
        while any(request.is_suspect for request in requests) or len(in_flight(engine)) < 2:
            engine.step()
        engine.executor.lose_agent()
        engine.step()
    assert all(request.is_suspect for request in requests)
    while not engine.scheduler.is_idle:
        engine.step()
        assert len(in_flight(engine)) <= 1
    assert [len(engine.whole(name).token_ids) for name in "ab"] == [40, 40]


def test_a_failed_self_check_blames_no_request() -> None:
    """The agent computed wrong results and ends. No request caused that, so no request becomes suspect.

    Then an agent ends for another reason, which makes its requests suspect. A second loss of this kind would end a
    suspect request with an error. A failed self-check does not count as the second loss, so the request completes.
    """
    engine = Engine()
    requests = [engine.request(name, 6, 20) for name in "ab"]
    while len(in_flight(engine)) < 2:
        engine.step()
    engine.executor.lose_agent(loss=AgentLost("the row has other bits", failed_check="row", step=1))
    engine.step()
    assert not any(request.is_suspect for request in requests)
    engine.executor.lose_agent()
    engine.step()
    while len(in_flight(engine)) != 1:
        engine.step()
    [name] = in_flight(engine)
    engine.executor.lose_agent(loss=AgentLost("the row has other bits", failed_check="row", step=9))
    while not engine.scheduler.is_idle:
        engine.step()
    assert name in {request.request_id for request in requests}
    assert [engine.whole(request.request_id).token_ids for request in requests] == [
        tuple(expected_tokens(request, 64)) for request in requests
    ]
    assert [request.num_losses for request in requests] == [1, 1]
