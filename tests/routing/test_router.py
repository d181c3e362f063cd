"""Tests the router: the order of requests, the replica of each request, and how requests end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_serving.errors import ContextLengthError, QueueFullError, RequestError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.placement import Placed, Routing
from llm_serving.scheduler.limits import Policy
from llm_serving.telemetry.receipt import BlockReason, Phase
from support.fakes import make_limits, make_request
from support.routed_simulation import RoutedSimulation

SHARED = [[2 + (7 * place + 11 * family) % 50 for place in range(40)] for family in range(3)]


def routed(num_replicas: int = 2, **limits: object) -> RoutedSimulation:
    return RoutedSimulation(make_limits(**limits), num_replicas)


def started(simulation: RoutedSimulation) -> list[str]:
    return [name for name, request in simulation.requests.items() if request.first_scheduled_time is not None]


def ask(name: str, prompt: int | list[int] = 5, max_tokens: int = 8, **fields: object) -> Request:
    request = make_request(name, prompt, max_tokens)
    for field, value in fields.items():
        setattr(request, field, value)
    return request


def test_a_request_waits_in_the_router_until_a_replica_can_start_it() -> None:
    simulation = routed(max_num_seqs=1)
    simulation.add(*(ask(f"r{number}") for number in range(5)))
    simulation.schedule()
    assert started(simulation) == ["r0", "r1"]
    assert [request.replica for request in simulation.requests.values()] == [0, 1, None, None, None]
    assert simulation.router.num_unplaced == 3
    blocked = simulation.requests["r2"].receipt.num_blocked
    assert list(blocked) == [BlockReason.ROWS]
    simulation.finish()


def test_the_next_request_goes_to_the_first_free_batch_row() -> None:
    simulation = routed(max_num_seqs=1)
    simulation.add(ask("long", 5, 40), ask("short", 5, 2), ask("next", 5, 2))
    simulation.finish()
    assert simulation.requests["next"].replica == simulation.requests["short"].replica != 0


def test_the_admission_limit_holds_for_all_replicas_together() -> None:
    simulation = routed(max_num_seqs=1, max_waiting_requests=2)
    simulation.add(*(ask(f"r{number}") for number in range(4)))
    assert simulation.router.queue_full() is not None
    full = simulation.router.queue_full("", 1)
    assert full is not None
    assert str(full).startswith("5 requests are waiting and 2 can start")
    assert full.__traceback__ is None, "its frames would refer to the error"
    with pytest.raises(QueueFullError, match="max_waiting_requests") as refused:
        simulation.router.add_request(ask("more"))
    assert refused.value.retry_after_s >= 1.0
    simulation.schedule()
    assert simulation.router.queue_full() is not None
    simulation.finish()
    assert simulation.router.queue_full() is None


def test_batch_rows_of_a_lost_replica_do_not_count() -> None:
    simulation = routed(max_num_seqs=1, max_waiting_requests=2)
    simulation.lose(0)
    simulation.add(*(ask(f"r{number}") for number in range(3)))
    with pytest.raises(QueueFullError):
        simulation.router.add_request(ask("more"))
    simulation.finish()


def test_impossible_requests_and_used_ids_are_refused() -> None:
    simulation = routed()
    with pytest.raises(ContextLengthError):
        simulation.router.add_request(ask("endless", 60))
    simulation.add(ask("a"))
    with pytest.raises(RequestError, match="is being served"):
        simulation.router.add_request(ask("a"))
    simulation.schedule()
    with pytest.raises(RequestError, match="is being served"):
        simulation.router.add_request(ask("a"))
    simulation.finish()


def test_requests_expire_in_the_router() -> None:
    simulation = routed(max_num_seqs=1)
    simulation.add(ask("a", 5, 30), ask("b", 5, 30), ask("late", deadline=0.5))
    simulation.schedule()
    assert simulation.replicas[0].scheduler.next_wakeup(0.0) == 0.5
    simulation.now = 0.6
    simulation.schedule()
    assert simulation.ended == {"late": FinishReason.ABORT}
    simulation.finish()


def test_priority_counts_for_all_replicas() -> None:
    simulation = routed(max_num_seqs=1)
    simulation.add(ask("a", 5, 20), ask("b", 5, 20), ask("plain"), ask("urgent", priority=-1))
    simulation.finish()
    urgent, plain = simulation.requests["urgent"], simulation.requests["plain"]
    assert urgent.first_scheduled_time is not None
    assert plain.first_scheduled_time is not None
    assert urgent.receipt.phase_us[0] <= plain.receipt.phase_us[0]


def test_a_tenant_is_charged_for_service_on_all_replicas() -> None:
    """One tenant keeps both replicas busy with long outputs. The next request that starts is another tenant's."""
    simulation = routed(max_num_seqs=2)
    greedy = [ask(f"greedy{number}", 5, 20, tenant="greedy") for number in range(12)]
    simulation.add(*greedy)
    for _ in range(30):
        simulation.step_all()
    modest = ask("modest", 5, 4, tenant="modest")
    simulation.add(modest)
    waiting = [one for one in greedy if one.first_scheduled_time is None]
    assert waiting
    while modest.first_scheduled_time is None:
        simulation.step_all()
    assert all(one.first_scheduled_time in (None, modest.first_scheduled_time) for one in waiting)
    overtaken = [one for one in waiting if one.first_scheduled_time is None]
    assert len(overtaken) > len(waiting) - 4, "there are four batch rows, so modest overtakes most of them"
    simulation.finish()


def test_a_prompt_goes_to_the_replica_with_its_cached_prefix() -> None:
    simulation = routed(3, prefix_cache=True, num_blocks=65)
    for round_number in range(3):
        for family, shared in enumerate(SHARED):
            simulation.add(ask(f"{round_number}.{family}", [*shared[:24], 3 + round_number], 3))
        simulation.finish()
    homes = [{simulation.requests[f"{number}.{family}"].replica for number in range(3)} for family in range(3)]
    assert [len(found) for found in homes] == [1, 1, 1]
    assert len(set.union(*homes)) == 3
    placed = [replica.num_placed for replica in simulation.router.replicas]
    assert sum(numbers[Placed.PREFIX] for numbers in placed) == 6
    assert simulation.router.figures.prefix_hit_tokens == 6 * 24


def test_a_prompt_goes_to_the_replica_that_computes_its_prefix() -> None:
    simulation = routed(2, prefix_cache=True, num_blocks=65)
    simulation.add(ask("first", [*SHARED[0][:24], 3]))
    simulation.schedule()
    simulation.add(ask("second", [*SHARED[0][:24], 4]))
    simulation.finish()
    assert simulation.requests["second"].replica == simulation.requests["first"].replica
    assert simulation.requests["second"].num_cached_tokens == 24


def test_an_unbalanced_load_outweighs_a_prefix() -> None:
    """A cache has 256 tokens. Loads may differ by an eighth of the cache, which is 32 tokens.

    Here they differ by 40 tokens, so the request goes to the replica with the smaller load.
    """
    simulation = routed(2, prefix_cache=True, num_blocks=65)
    simulation.add(ask("first", [*SHARED[0][:24], 3], 40))
    simulation.schedule()
    simulation.add(ask("second", [*SHARED[0][:24], 4], 8))
    simulation.schedule()
    assert simulation.requests["second"].replica != simulation.requests["first"].replica
    simulation.finish()


def test_requests_with_different_salts_share_nothing() -> None:
    simulation = routed(2, prefix_cache=True, num_blocks=65)
    simulation.add(ask("first", [*SHARED[0][:24], 3], 2))
    simulation.finish()
    simulation.add(ask("other", [*SHARED[0][:24], 3], 2, cache_salt=b"x"))
    simulation.finish()
    assert simulation.requests["other"].num_cached_tokens == 0
    assert sum(replica.num_placed[Placed.PREFIX] for replica in simulation.router.replicas) == 0


def test_a_group_stays_together_and_moves_together() -> None:
    simulation = routed(2, max_num_seqs=1)
    simulation.add(*(ask(f"s{number}", 6, 6, group="g") for number in range(4)), ask("alone", 6, 6))
    simulation.schedule()
    assert [simulation.requests[f"s{number}"].replica for number in range(4)] == [0] * 4
    assert simulation.requests["alone"].replica == 1
    simulation.lose(0)
    while "alone" not in simulation.ended:
        simulation.step_all()
    simulation.step_all()
    assert {simulation.requests[f"s{number}"].replica for number in range(4)} == {1}
    simulation.revive(0)
    simulation.finish()
    assert {simulation.requests[f"s{number}"].replica for number in range(4)} == {1}


def test_round_robin() -> None:
    simulation = RoutedSimulation(make_limits(), 3, routing=Routing.ROUND_ROBIN)
    simulation.add(*(ask(f"r{number}", 3 + number) for number in range(6)))
    simulation.schedule()
    assert [request.replica for request in simulation.requests.values()] == [0, 1, 2] * 2
    simulation.finish()


def test_requests_of_a_lost_replica_restart_first() -> None:
    simulation = routed(2, max_num_seqs=1)
    simulation.add(ask("a", 5, 20), ask("b", 5, 20), ask("waits"))
    for _ in range(6):
        simulation.step_all()
    assert simulation.requests["a"].output_token_ids
    simulation.lose(0)
    a, waits = simulation.requests["a"], simulation.requests["waits"]
    assert a.receipt.phase is Phase.RESTARTED
    simulation.finish()
    assert waits.first_token_time is not None
    assert a.finish_time is not None
    assert a.receipt.preemptions == 0


@settings(max_examples=60, deadline=None)
@given(
    num_replicas=st.integers(2, 4),
    policy=st.sampled_from(Policy),
    prefix_cache=st.booleans(),
    max_num_seqs=st.integers(1, 4),
    asked=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=40
    ),
)
def test_no_request_starves(
    num_replicas: int,
    policy: Policy,
    prefix_cache: bool,
    max_num_seqs: int,
    asked: list[tuple[int, int, int, int]],
) -> None:
    """Requests of equal priority leave the queue in order of arrival, whatever the caches contain.

    Each request is always either in the queue or on one replica, and all requests end.
    """
    limits = make_limits(policy=policy, prefix_cache=prefix_cache, max_num_seqs=max_num_seqs, ttft_objective=1e6)
    simulation = RoutedSimulation(limits, num_replicas)
    for number, (family, length, max_tokens, steps) in enumerate(asked):
        simulation.add(ask(f"r{number}", [*SHARED[family][:length], 3], max_tokens))
        for _ in range(steps):
            simulation.step_all()
            placed = [request.replica is not None for request in simulation.requests.values()]
            assert placed == sorted(placed, reverse=True), "a request was overtaken"
    simulation.finish()


def test_requests_that_wait_at_a_replica_count_for_the_admission_limit() -> None:
    """All replicas have free batch rows, but no free blocks.

    Requests that wait at a replica fill the queue's limit, too.
    """
    simulation = routed(max_num_seqs=16, max_waiting_requests=2, num_blocks=16, block_size=4)
    for number in range(40):
        if simulation.router.queue_full() is None:
            simulation.add(ask(f"r{number}", 12, 8))
        simulation.schedule()
    waiting = [name for name in simulation.requests if name not in started(simulation)]
    # At most two requests wait in the queue. On each of the two replicas, one request waits that was placed there but
    # found no free blocks.
    assert len(waiting) <= 4
    simulation.finish()


def test_a_step_without_waiting_requests_looks_at_one_replica_only() -> None:
    """Otherwise the cost of each step would grow with the number of replicas."""
    simulation = routed(6)
    simulation.add(*(ask(f"r{number}", max_tokens=20) for number in range(6)))
    for _ in range(8):
        simulation.schedule()
        simulation.answer()
    looked_at: list[int] = []
    for replica in simulation.router.replicas:
        scheduler = replica.scheduler

        class Watched:
            def __init__(self, index: int, inner: object) -> None:
                self.index, self.inner = index, inner

            def __getattr__(self, name: str) -> object:
                if name not in ("schedule", "take_ended"):
                    looked_at.append(self.index)
                return getattr(self.inner, name)

        replica.scheduler = Watched(replica.index, scheduler)  # type: ignore[assignment]
    simulation.router.schedule(simulation.router.replicas[3], simulation.now)
    assert looked_at == []
