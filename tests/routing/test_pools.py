"""Tests the pools of replicas by prompt length: which replica gets a prompt, and what happens if a pool is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from llm_serving.errors import AgentLostError, QueueFullError, RequestError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.placement import Placed
from llm_serving.routing.pools import PoolState, PromptPool, PromptPools
from llm_serving.routing.router import Router
from support.fakes import make_limits, make_request
from support.routed_simulation import RoutedSimulation, play_routed
from support.script_drawing import draw_script

SHORT, LONG = 8, 9
"""Tokens of the longest prompt of the pool ``short``, and of the shortest prompt of the pool ``long``."""


def pools(short: int = 1, long: int = 1) -> PromptPools:
    """Replica 0 belongs to the pool ``long``, and replica 1 to the pool ``short``."""
    return PromptPools([PromptPool("short", short, SHORT), PromptPool("long", long)])


def routed(short: int = 1, long: int = 1, **limits: object) -> RoutedSimulation:
    return RoutedSimulation(make_limits(**limits), short + long, pools=pools(short, long))


def replicas_of(simulation: RoutedSimulation) -> dict[str, tuple[int, ...]]:
    return {status.name: status.replicas for status in simulation.router.pool_statuses()}


def places(simulation: RoutedSimulation) -> dict[str, int | None]:
    return {name: request.replica for name, request in simulation.requests.items()}


def test_the_prompt_decides_the_pool_and_the_output_does_not() -> None:
    simulation = routed()
    assert replicas_of(simulation) == {"short": (1,), "long": (0,)}
    simulation.add(make_request("a", SHORT, 30), make_request("b", LONG, 2), make_request("c", 1, 20))
    simulation.schedule()
    assert places(simulation) == {"a": 1, "b": 0, "c": 1}
    simulation.finish()
    assert places(simulation) == {"a": 1, "b": 0, "c": 1}
    assert {status.name: status.placed for status in simulation.router.pool_statuses()} == {"short": 2, "long": 1}


def test_a_prompt_goes_to_the_smallest_pool_that_it_fits() -> None:
    three = PromptPools([PromptPool("long", 1), PromptPool("short", 1, 4), PromptPool("middle", 1, 8)])
    assert [three.pool_of(make_request("a", length)) for length in (1, 4, 5, 8, 9, 1000)] == [0, 0, 1, 1, 2, 2]
    limited = PromptPools([PromptPool("short", 1, 4), PromptPool("long", 1, 100)])
    assert [limited.pool_of(make_request("a", length)) for length in (4, 5, 100, 101)] == [0, 1, 1, 1]


def test_a_request_may_name_a_pool_for_longer_prompts() -> None:
    simulation = routed()
    named = make_request("named", 3, 4)
    named.pool = "long"
    simulation.add(named, make_request("other", 3, 4))
    simulation.finish()
    assert places(simulation) == {"named": 0, "other": 1}


def test_the_first_replicas_cover_all_pools_and_replica_0_serves_all_prompts() -> None:
    simulation = RoutedSimulation(
        make_limits(), 6, pools=PromptPools([PromptPool("a", 3, 4), PromptPool("b", 2, 8), PromptPool("c", 1)])
    )
    assert replicas_of(simulation) == {"a": (2, 4, 5), "b": (1, 3), "c": (0,)}
    assert [simulation.router._pools.name_of(replica) for replica in range(6)] == ["c", "b", "a", "b", "a", "a"]


def test_long_prompts_that_wait_do_not_delay_short_ones() -> None:
    simulation = routed(max_num_seqs=1)
    simulation.add(*(make_request(f"long {number}", LONG, 20) for number in range(3)), make_request("short", 3, 2))
    simulation.schedule()
    assert places(simulation) == {"long 0": 0, "long 1": None, "long 2": None, "short": 1}
    assert [status.waiting for status in simulation.router.pool_statuses()] == [0, 2]
    simulation.finish()
    assert {place for name, place in places(simulation).items() if name != "short"} == {0}


def test_short_prompts_wait_for_their_pool_while_it_is_ready() -> None:
    simulation = routed(max_num_seqs=1)
    simulation.add(*(make_request(f"r{number}", 3, 4) for number in range(4)))
    simulation.finish()
    assert set(places(simulation).values()) == {1}


def test_without_its_pool_a_short_prompt_goes_to_the_pool_for_longer_ones() -> None:
    simulation = routed(max_num_seqs=2)
    simulation.add(make_request("running", 3, 20))
    for _ in range(3):
        simulation.step_all()
    simulation.lose(1)
    simulation.add(make_request("new", 3, 4))
    simulation.schedule()
    assert places(simulation) == {"running": 0, "new": 0}
    assert [status.ready for status in simulation.router.pool_statuses()] == [0, 1]
    simulation.finish()


def test_requests_need_their_pool_also_while_they_run_elsewhere() -> None:
    """Otherwise, no machine would be started for a pool without replicas whose requests another pool serves."""
    simulation = routed(max_num_seqs=2)
    router = simulation.router

    def figures() -> dict[str, tuple[int, int, int]]:
        return {status.name: (status.waiting, status.running, status.needing) for status in router.pool_statuses()}

    assert router.pool_states() == {"short": PoolState(True, True), "long": PoolState(True, True)}
    simulation.lose(1)
    simulation.add(*(make_request(f"s{number}", 3, 20) for number in range(3)), make_request("l", LONG, 20))
    for _ in range(3):
        simulation.step_all()
    assert figures() == {"short": (1, 0, 3), "long": (1, 2, 3)}
    assert router.pool_states() == {"short": PoolState(False, False), "long": PoolState(False, True)}
    simulation.finish()
    assert figures() == {"short": (0, 0, 0), "long": (0, 0, 0)}


def test_a_pool_is_idle_only_without_requests_of_others_at_its_replicas() -> None:
    simulation = routed()
    simulation.lose(1)
    simulation.add(make_request("short", 3, 20))
    for _ in range(3):
        simulation.step_all()
    assert not simulation.router.pool_states()["long"].is_idle
    simulation.finish()


def test_a_long_prompt_waits_until_its_pool_returns() -> None:
    simulation = routed()
    simulation.add(make_request("running", LONG, 20))
    for _ in range(3):
        simulation.step_all()
    assert simulation.requests["running"].output_token_ids
    simulation.lose(0)
    simulation.add(make_request("waits", LONG, 4), make_request("short", 3, 4))
    while "short" not in simulation.ended:
        simulation.step_all()
    assert places(simulation)["waits"] is None
    assert "running" not in simulation.ended
    assert simulation.router.num_unplaced == 2, "short prompts overtake requests of a lost pool, also preempted ones"
    simulation.finish()
    assert simulation.ended["running"] is simulation.ended["waits"] is FinishReason.LENGTH
    assert simulation.served_by == {"running": {0}, "waits": {0}, "short": {1}}


def test_the_deadline_of_a_request_whose_pool_is_lost_holds() -> None:
    simulation = routed()
    simulation.lose(0)
    simulation.add(make_request("late", LONG, 4, deadline=0.5), make_request("short", 3, 4, deadline=9.0))
    simulation.schedule()
    assert simulation.replicas[1].scheduler.next_wakeup(0.0) == 0.5
    simulation.now = 0.6
    simulation.schedule()
    assert simulation.ended == {"late": FinishReason.ABORT}
    simulation.finish()


def test_a_drained_pool_gives_its_waiting_requests_to_longer_pools_and_completes_the_others() -> None:
    simulation = routed(max_num_seqs=1)
    simulation.add(make_request("running", 3, 8), make_request("waits", 3, 8))
    simulation.step_all()
    simulation.router.drain(1, simulation.now)
    simulation.schedule()
    assert places(simulation) == {"running": 1, "waits": 0}
    simulation.router.drain(0, simulation.now)
    simulation.add(make_request("long", LONG, 4))
    for _ in range(20):
        simulation.step_all()
    assert places(simulation)["long"] is None
    assert set(simulation.ended) == {"running", "waits"}
    assert simulation.router.is_drained(0)
    simulation.router.agent_ready(0)
    simulation.finish()
    assert simulation.served_by == {"running": {1}, "waits": {0}, "long": {0}}


def test_a_short_prompt_that_is_stuck_in_a_longer_pool_returns_to_its_own() -> None:
    """Both requests wait at replica 0, whose only batch row is in use. Only the short prompt may go elsewhere."""
    simulation = routed(max_num_seqs=1)
    router = simulation.router
    simulation.lose(1)
    simulation.add(make_request("runs", LONG, 20))
    simulation.step_all()
    simulation.add(make_request("short", 3, 4), make_request("long", LONG, 4))
    for queue, name in zip(router._queues, ("short", "long"), strict=True):
        entry = router._entries[name]
        queue.placer._leave_queue(entry, simulation.now)
        queue.placer.bind(entry, router.replicas[0], Placed.LOAD, simulation.now)
    simulation.schedule()
    assert places(simulation) == {"runs": 0, "short": 0, "long": 0}
    simulation.revive(1)
    simulation.schedule()
    assert places(simulation) == {"runs": 0, "short": 1, "long": 0}
    assert router.replicas[0].num_recalled == 1
    simulation.finish()


def test_a_request_that_found_no_place_is_tried_again_at_other_replicas() -> None:
    """Both replicas are equally full, so their capacities do not show that other replicas are asked."""
    simulation = routed(max_num_seqs=1)
    simulation.add(make_request("long", LONG, 20), make_request("short", LONG - 1, 20), make_request("waits", 3, 4))
    simulation.schedule()
    router = simulation.router
    placer, entry, (long, short) = router._queues[0].placer, router._entries["waits"], router.replicas
    assert placer._is_still_blocked(entry, [short])
    assert not placer._is_still_blocked(entry, [long])
    simulation.finish()


def test_each_pool_has_its_own_admission_limit() -> None:
    simulation = routed(max_num_seqs=1, max_waiting_requests=2)
    simulation.add(*(make_request(f"long {number}", LONG, 4) for number in range(3)))
    with pytest.raises(QueueFullError):
        simulation.router.add_request(make_request("long 3", LONG))
    assert simulation.router.queue_full() is None, "short prompts are still accepted"
    assert simulation.router.queue_full("", 9) is None, "their prompts may all be long"
    simulation.add(*(make_request(f"short {number}", 3, 4) for number in range(3)))
    assert simulation.router.queue_full() is not None
    simulation.finish()


def test_an_id_is_used_once_in_all_pools() -> None:
    simulation = routed()
    simulation.add(make_request("a", LONG))
    with pytest.raises(RequestError, match="is being served"):
        simulation.router.add_request(make_request("a", 3))
    simulation.finish()


def test_requests_of_a_pool_that_never_returns_end_with_an_error() -> None:
    simulation = routed()
    router = simulation.router
    simulation.add(make_request("long", LONG, 20), make_request("short", 3, 20))
    simulation.step_all()
    simulation.lose(0)
    router.give_up(0, simulation.now)
    [update] = router.take_ended()
    assert update.request.request_id == "long"
    assert update.error is not None
    assert "all replicas of the pools for them (long) were lost" in update.error
    simulation.take([update])
    with pytest.raises(AgentLostError, match="no replica is left for prompts of this length"):
        router.add_request(make_request("another", LONG))
    simulation.add(make_request("later", 3, 4))
    while len(simulation.ended) < 3:
        simulation.step_all()
    assert simulation.served_by["later"] == {1}
    router.check_integrity()


def test_a_lost_short_pool_closes_nothing() -> None:
    simulation = routed()
    simulation.lose(1)
    simulation.router.give_up(1, simulation.now)
    simulation.add(make_request("short", 3, 4), make_request("long", LONG, 4))
    while len(simulation.ended) < 2:
        simulation.step_all()
    assert simulation.served_by == {"short": {0}, "long": {0}}


def test_tenants_are_charged_in_the_queue_of_their_pool() -> None:
    simulation = routed(max_num_seqs=1)

    def ask(name: str, tenant: str, length: int) -> Request:
        request = make_request(name, length, 6)
        request.tenant = tenant
        return request

    simulation.add(ask("first", "greedy", LONG), ask("second", "greedy", LONG), ask("modest", "modest", LONG))
    simulation.add(ask("short", "modest", 3))
    while len(simulation.ended) < 4:
        simulation.step_all()
    started = {name: request.first_scheduled_time for name, request in simulation.requests.items()}
    assert started["modest"] < started["second"]  # type: ignore[operator]


def test_without_pools_the_status_has_none() -> None:
    simulation = RoutedSimulation(make_limits(), 2)
    assert simulation.router.pool_statuses() == []
    assert simulation.router.pool_states() == {}
    with pytest.raises(AssertionError, match="refuses roles with pools"):
        Router(simulation.inner, split=object(), pools=pools())  # type: ignore[arg-type]


def test_texts_do_not_depend_on_pools() -> None:
    """Runs random scripts with lost replicas, preemptions and restarts. No pool gets a prompt beyond its limit."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        limit = random.Random(seed).choice([4, 8, 16, 24])
        chosen = PromptPools([PromptPool("short", 1 + seed % 2, limit), PromptPool("long", 2 - seed % 2)])
        played = play_routed(draw_script(7000 + seed), 3, seed, pools=chosen)
        seen.update(played.seen)
        short = set(replicas_of(played)["short"])
        for name, served in played.served_by.items():
            is_short = len(played.requests[name].prompt_token_ids) <= limit
            assert is_short or not served & short
            seen["short prompts of other pools"] += is_short and bool(served - short)
            seen["requests of several replicas"] += len(served) > 1
    expected = (
        *("agents lost", "preemptions", "requests that lost their replica", "requests of several replicas"),
        *("short prompts of other pools", "deadlines", "swaps"),
    )
    missing = [name for name in expected if not seen[name]]
    assert not missing, (missing, seen)
