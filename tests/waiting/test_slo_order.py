"""Tests the order in which waiting requests start under policy ``slo``.

Requests that can still be on time start first. The tests also check how often a late request starts.
"""

from __future__ import annotations

import random

import pytest

from llm_serving.scheduler.sequence import Sequence
from llm_serving.waiting.queue_order import QueueOrder
from llm_serving.waiting.slo_order import LATE_SHARE, SloOrder
from support.waiting_sequences import Arrivals, drain, make_intake, put


def make_order(
    *, overhead: float = 0.0, per_token: float = 0.0, margin: float = 0.0, fairness: bool = True
) -> SloOrder:
    order = SloOrder(10.0, 100.0, margin=margin, fairness=fairness)
    order.learn(overhead, per_token)
    return order


def fill(order: SloOrder, sequences: list[Sequence]) -> SloOrder:
    for sequence in sequences:
        order.add(sequence)
    return order


def start_all(order: QueueOrder, now: float) -> list[int]:
    started = []
    while len(order):
        sequence = order.first(now)
        order.start(sequence)
        started.append(sequence.arrival_index)
    return started


def test_the_earliest_due_request_is_first() -> None:
    new = Arrivals()
    sequences = [new.next(ttft_objective=objective) for objective in (5.0, None, 2.0)]
    sequences.append(new.next(arrival=1.0, ttft_objective=2.0))
    assert start_all(fill(make_order(), sequences), 1.0) == [2, 3, 0, 1]


def test_equal_objectives_are_first_come_first_served() -> None:
    new = Arrivals()
    assert start_all(fill(make_order(), [new.next() for _ in range(5)]), 1.0) == [0, 1, 2, 3, 4]


def test_a_level_of_priority_is_worth_the_ageing_time() -> None:
    new = Arrivals()
    sequences = [new.next(priority=1), new.next(ttft_objective=109.0), new.next(ttft_objective=111.0)]
    assert start_all(fill(make_order(), sequences), 0.0) == [1, 0, 2]


def test_the_latest_start_leaves_time_for_the_prefill_and_the_margin() -> None:
    order, new = make_order(overhead=0.5, per_token=0.01, margin=0.1), Arrivals()
    assert order.latest_start(new.next(100, arrival=3.0)) == pytest.approx(3.0 + 9.0 - 0.5 - 1.0)
    assert order.latest_start(new.next(100, arrival=3.0, ttft_objective=2.0)) == pytest.approx(3.0 + 1.8 - 1.5)


def test_late_requests_come_after_those_on_time() -> None:
    new = Arrivals()
    long, short = new.next(300, ttft_objective=4.0), new.next(100, ttft_objective=5.0)
    # To be on time, the request ``long`` must start before 1.0 s, and the request ``short`` before 4.0 s.
    order = fill(make_order(per_token=0.01), [long, short])
    assert order.first(1.0) is long
    assert (order.first(1.5), order.num_late) == (short, 1)
    assert start_all(order, 1.5) == [1, 0]


def test_at_the_latest_start_a_request_is_not_late_yet() -> None:
    new = Arrivals()
    order = fill(make_order(per_token=0.5), [new.next(10, ttft_objective=8.0)])
    order.first(3.0)
    assert order.num_late == 0
    order.first(3.001)
    assert order.num_late == 1


def test_late_requests_are_ordered_by_priority_and_arrival() -> None:
    new = Arrivals()
    sequences = [new.next(priority=1), new.next(ttft_objective=1.0), new.next(ttft_objective=0.5)]
    assert start_all(fill(make_order(), sequences), 50.0) == [1, 2, 0]


def test_the_estimate_decides_which_requests_are_late() -> None:
    new, order = Arrivals(), make_order(per_token=0.01)
    sequences = [new.next(500, ttft_objective=6.0), new.next(100, ttft_objective=7.0)]
    fill(order, sequences)
    assert order.first(0.0) is sequences[0]
    order.learn(0.0, 0.02)
    assert (order.first(0.0), order.num_late) == (sequences[1], 1)
    order.learn(0.0, 0.021)  # a small change
    assert order.latest_start(sequences[0]) == 6.0 - 500 * 0.02
    order.learn(0.0, 0.01)
    assert (order.first(0.0), order.num_late) == (sequences[0], 0)


def test_late_requests_get_their_fraction_of_the_starts() -> None:
    new, order = Arrivals(), make_order()
    late = [new.next(ttft_objective=1.0) for _ in range(3)]
    on_time = [new.next(ttft_objective=1000.0) for _ in range(3 * LATE_SHARE)]
    started = start_all(fill(order, late + on_time), 5.0)
    places = [started.index(sequence.arrival_index) for sequence in late]
    assert places == [LATE_SHARE - 1, 2 * LATE_SHARE - 1, 3 * LATE_SHARE - 1]


def test_a_late_request_waits_for_a_limited_number_of_starts() -> None:
    """More requests arrive than can start.

    The first late request waits for at most LATE_SHARE starts of other requests.
    """
    for seed in range(5):
        rng, new, order = random.Random(seed), Arrivals(), make_order()
        waited = 0
        for step in range(400):
            now = step * 0.1
            for _ in range(3):
                order.add(new.next(arrival=now, ttft_objective=rng.choice([0.1, 1.0, 5.0]), tenant=rng.choice("ab")))
            first = order.first(now)
            late = order.num_late
            order.start(first)
            waited = 0 if order.num_late < late or not late else waited + 1
            assert waited < LATE_SHARE


def test_late_requests_take_less_than_a_hundredth_of_the_starts_of_an_overload() -> None:
    """Twice as many requests arrive as can start, so half of them become late. Each late start costs goodput."""
    new, order, num_late, num_starts = Arrivals(), make_order(), 0, 1500
    for step in range(num_starts):
        now = step * 0.01
        for _ in range(2):
            order.add(new.next(arrival=now, ttft_objective=1.0))
        first = order.first(now)
        num_late += order.is_late(first)
        order.start(first)
    assert order.num_late > num_starts / 4
    assert 0 < num_late < num_starts / 100


def test_a_tenant_with_many_requests_does_not_make_others_late() -> None:
    new, order = Arrivals(), make_order()
    fill(order, [new.next(10, tenant="flood", ttft_objective=1.0) for _ in range(20)])
    fill(order, [new.next(10, tenant="modest", ttft_objective=9.0) for _ in range(2)])
    assert start_all(order, 0.0)[:5] == [0, 20, 1, 21, 2]
    alike = make_order(fairness=False)
    new = Arrivals()
    fill(alike, [new.next(10, tenant="flood", ttft_objective=1.0) for _ in range(20)])
    fill(alike, [new.next(10, tenant="modest", ttft_objective=9.0) for _ in range(2)])
    assert start_all(alike, 0.0) == list(range(22))


def test_service_counts_for_late_requests_and_those_on_time() -> None:
    new, order = Arrivals(), make_order()
    sequences = [new.next(10, tenant=tenant) for tenant in "aabb"]
    fill(order, sequences)
    order.start(sequences[0])
    order.charge_outputs([sequences[0].request])
    assert order.first(0.0) is sequences[2]
    order.start(sequences[2])  # the counter of tenant a is now 12, and that of tenant b is 10
    assert order.first(0.0) is sequences[3]


def test_late_requests_and_those_on_time_can_be_removed() -> None:
    new, order = Arrivals(), make_order()
    late, on_time = new.next(ttft_objective=1.0), new.next()
    fill(order, [late, on_time]).first(5.0)
    order.remove(late)
    order.remove(on_time)
    assert len(order) == 0
    with pytest.raises(KeyError):
        order.remove(late)


def test_the_intake_uses_the_order() -> None:
    new, intake = Arrivals(), make_intake(order=make_order())
    put(intake, *(new.next(ttft_objective=objective) for objective in (5.0, 3.0, 0.5)))
    intake.put_back(new.next(ttft_objective=9.0))
    assert drain(intake, 1.0) == [3, 1, 0, 2]
