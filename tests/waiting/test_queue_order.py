"""Tests the order of the queue.

The tests cover priority and ageing between classes, exact orders in a class, and limits of the waiting time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from llm_serving.scheduler.sequence import Sequence
from llm_serving.waiting.queue_order import MAX_IDLE_CLASSES, QueueOrder
from support.waiting_sequences import Arrivals


def start_all(order: QueueOrder) -> list[int]:
    started = []
    while len(order):
        sequence = order.first(0.0)
        order.start(sequence)
        started.append(sequence.arrival_index)
    return started


def order_of(sequences: list[Sequence], ageing_s: float = 10.0, *, fairness: bool = True) -> QueueOrder:
    order = QueueOrder(ageing_s, fairness=fairness)
    for sequence in sequences:
        order.add(sequence)
    return order


def test_smaller_priorities_start_first_and_equal_ones_by_arrival() -> None:
    new = Arrivals()
    order = order_of([new.next(priority=priority) for priority in (1, 0, 1, -1, 0, -1)])
    assert start_all(order) == [3, 5, 1, 4, 0, 2]


def test_a_level_of_priority_is_worth_the_ageing_time() -> None:
    new = Arrivals()
    sequences = [new.next(priority=2, arrival=0.0), new.next(priority=1, arrival=10.5)]
    sequences += [new.next(arrival=at) for at in (19.0, 20.0, 20.25, 20.75)]
    # Each level of priority counts as 10 seconds of waiting. So the first two requests count as arrivals at 20 s and at
    # 20.5 s with priority 0. In a tie, the smaller priority number is first.
    assert start_all(order_of(sequences)) == [2, 3, 0, 4, 1, 5]


def test_tenants_alternate_by_their_service() -> None:
    new = Arrivals()
    big = [new.next(30, tenant="big") for _ in range(3)]
    small = [new.next(10, tenant="small") for _ in range(6)]
    assert start_all(order_of(big + small)) == [0, 3, 4, 5, 1, 6, 7, 8, 2]
    assert start_all(order_of(big + small, fairness=False)) == list(range(9))


def test_output_tokens_count_twice() -> None:
    new = Arrivals()
    sequences = [new.next(prompt, tenant=tenant) for prompt, tenant in ((10, "a"), (16, "b"), (1, "a"), (1, "b"))]
    order = order_of(sequences)
    for sequence in sequences[:2]:
        order.start(sequence)
    order.charge_outputs([sequences[0].request] * 4)  # the counters are now 18 for tenant a and 16 for tenant b
    assert start_all(order) == [3, 2]


def test_each_class_has_its_own_counters() -> None:
    new = Arrivals()
    order = order_of([new.next(500, tenant="a", priority=-1), new.next(1, tenant="a"), new.next(1, tenant="b")])
    assert start_all(order) == [0, 1, 2]


def test_counters_survive_an_empty_queue() -> None:
    new = Arrivals()
    order = order_of([new.next(50, tenant="a"), new.next(1, tenant="b")])
    assert start_all(order) == [0, 1]
    for tenant in "ba":
        order.add(new.next(20, tenant=tenant))
        order.add(new.next(20, tenant=tenant))
    # The counter of tenant a is 50. Both requests of tenant b start first, at counters 1 and 21.
    assert start_all(order) == [2, 3, 4, 5]


def test_the_number_of_classes_is_limited() -> None:
    new, order = Arrivals(), QueueOrder()
    for priority in range(3 * MAX_IDLE_CLASSES):
        order.add(new.next(priority=priority))
        order.start(order.first(0.0))
    assert len(order._idle) == MAX_IDLE_CLASSES
    assert not order._classes
    # The queue has already forgotten the class of priority 0, because too many classes are idle. So this call changes
    # no counter.
    order.charge_outputs([new.next(priority=0).request])


@given(
    st.lists(st.tuples(st.integers(-2, 3), st.floats(0, 4, width=16)), max_size=30),
    st.sampled_from([0.0, 0.5, 1.0, 5.0, 1e6]),
)
def test_with_one_tenant_the_order_is_by_arrival_and_priority_in_seconds(
    arrivals: list[tuple[int, float]], ageing_s: float
) -> None:
    new, now, sequences = Arrivals(), 0.0, []
    for priority, gap in arrivals:
        now += gap
        sequences.append(new.next(priority=priority, arrival=now))
    by_rule = sorted(
        sequences, key=lambda s: (s.request.arrival_time + ageing_s * s.request.priority, s.request.priority)
    )
    assert start_all(order_of(sequences, ageing_s)) == [sequence.arrival_index for sequence in by_rule]


def urgent_load(seed: int, order: QueueOrder) -> Iterator[tuple[Sequence, list[Sequence]]]:
    """Yields each start until a request of priority 3 starts, together with the requests that waited then.

    More urgent requests arrive twice as fast as requests can start.
    """
    rng, new, now = random.Random(seed), Arrivals(), 0.0
    patient = new.next(priority=3, tenant="patient")
    waiting = [patient]
    order.add(patient)
    while patient in waiting:
        for _ in range(2):
            waiting.append(new.next(rng.randint(1, 9), now, priority=rng.randint(0, 2), tenant=rng.choice("abc")))
            order.add(waiting[-1])
        started = order.first(now)
        order.start(started)
        order.charge_outputs([started.request] * rng.randint(1, 9))
        yield started, list(waiting)
        waiting.remove(started)
        now += 0.25


def test_no_request_overtakes_by_more_than_the_ageing_allows() -> None:
    for seed in range(8):
        starts = list(urgent_load(seed, QueueOrder(10.0, fairness=False)))
        assert len(starts) > 80, "it waited for requests that were ahead of it"
        for started, _ in starts:
            assert started.request.arrival_time <= 10.0 * (3 - started.request.priority)


def test_a_class_is_first_only_while_it_has_a_request_that_may_be() -> None:
    for seed in range(8):
        starts = list(urgent_load(seed, QueueOrder(10.0)))
        assert len(starts) > 80
        for started, waiting in starts:
            priority = started.request.priority
            oldest = next(s for s in waiting if s.request.priority == priority)
            assert oldest.request.arrival_time <= 10.0 * (3 - priority)
