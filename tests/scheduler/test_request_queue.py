from __future__ import annotations

import pytest

from llm_serving.errors import QueueFullError
from llm_serving.scheduler.intake import MAX_RETRY_AFTER_S, RequestQueue
from llm_serving.scheduler.sequence import Sequence
from support.fakes import make_request
from support.waiting_sequences import Arrivals


def make_sequences(count: int) -> list[Sequence]:
    return [Sequence(make_request(str(index), index + 1), index, 8) for index in range(count)]


def take_all(queue: RequestQueue) -> list[int]:
    taken = []
    while queue:
        first = queue.peek()
        assert queue.pop() is first
        taken.append(first.arrival_index)
    return taken


def test_first_come_first_served() -> None:
    queue = RequestQueue(8, None)
    for sequence in make_sequences(4):
        queue.append(sequence)
    assert (len(queue), queue.num_tokens) == (4, 10)
    assert take_all(queue) == [0, 1, 2, 3]
    assert queue.num_tokens == 0


def test_the_preempted_come_back_in_order_of_arrival_whatever_the_order_of_their_return() -> None:
    queue, sequences = RequestQueue(8, None), make_sequences(5)
    queue.append(sequences[3])
    queue.append(sequences[4])
    for index in (1, 2, 0):
        queue.put_back(sequences[index])
    assert take_all(queue) == [0, 1, 2, 3, 4]


def test_a_request_can_leave_from_anywhere() -> None:
    queue, sequences = RequestQueue(8, None), make_sequences(5)
    for index in (2, 3, 4):
        queue.append(sequences[index])
    for index in (0, 1):
        queue.put_back(sequences[index])
    for index in (3, 0):
        queue.remove(sequences[index])
    assert queue.num_tokens == 2 + 3 + 5
    assert take_all(queue) == [1, 2, 4]


def test_the_preempted_go_before_the_most_urgent() -> None:
    queue, new = RequestQueue(8, None), Arrivals()
    preempted, urgent = new.next(priority=5), new.next(priority=-5)
    queue.append(urgent)
    queue.put_back(preempted)
    assert queue.num_returned == 1
    assert take_all(queue) == [0, 1]


def test_a_prompt_is_paid_for_once() -> None:
    queue, new = RequestQueue(8, None), Arrivals()
    first, *others = [new.next(10, tenant=tenant) for tenant in "aab"]
    for sequence in (first, *others):
        queue.append(sequence)
    queue.start(first, 0.0)  # a owes 10
    queue.put_back(first)
    assert queue.pop() is first
    queue.charge_output(others[1], 4)  # b owes 8
    assert take_all(queue) == [2, 1]


def test_whoever_starts_need_not_be_the_first() -> None:
    queue, new = RequestQueue(8, None), Arrivals()
    sequences = [new.next(2) for _ in range(3)]
    for sequence in sequences:
        queue.append(sequence)
    queue.start(sequences[1], 0.0)
    assert (take_all(queue), queue.num_tokens) == ([0, 2], 0)


def test_expired_requests_come_out_in_order_of_their_deadlines() -> None:
    queue, new = RequestQueue(8, None), Arrivals()
    sequences = [new.next(2, deadline=deadline) for deadline in (3.0, None, 1.0, 2.0, 2.0)]
    for sequence in sequences:
        queue.append(sequence)
    assert queue.next_deadline == 1.0
    assert queue.pop_expired(0.999) == []
    assert [sequence.arrival_index for sequence in queue.pop_expired(2.0)] == [2, 3, 4]
    assert (queue.next_deadline, len(queue), queue.num_tokens) == (3.0, 2, 4)
    queue.remove(sequences[0])
    assert queue.next_deadline is None
    assert queue.pop_expired(100.0) == []


def test_a_preempted_request_expires_only_without_a_first_token() -> None:
    queue, new = RequestQueue(8, None), Arrivals()
    begun, cut_off = new.next(deadline=1.0), new.next(deadline=1.0)
    begun.request.first_token_time = 0.5
    for sequence in (begun, cut_off):
        queue.put_back(sequence)
    assert queue.pop_expired(1.0) == [cut_off]
    assert take_all(queue) == [0]


def refused(queue: RequestQueue, num_tokens: int) -> float:
    with pytest.raises(QueueFullError) as refusal:
        queue.check_room(num_tokens, 0)
    return refusal.value.retry_after_s


def test_a_refusal_says_when_there_will_be_room_by_requests() -> None:
    queue, new = RequestQueue(3, None), Arrivals()
    for _ in range(6):
        queue.append(new.next(5, arrival=0.0))
    assert refused(queue, 5) == 1.0, "nothing has left yet"
    queue.pop(10.0)
    assert refused(queue, 5) == pytest.approx(30.0)  # 3 have to go
    queue.pop(20.0)
    assert refused(queue, 5) == pytest.approx(20.0, rel=0.01)


def test_a_refusal_says_when_there_will_be_room_by_tokens() -> None:
    queue, new = RequestQueue(100, 100), Arrivals()
    for _ in range(11):
        queue.append(new.next(10, arrival=5.0))
    queue.pop(9.0)
    assert refused(queue, 30) == pytest.approx(12.0)  # 30 tokens at 10 in 4 seconds


def test_the_time_the_queue_is_empty_does_not_count() -> None:
    queue, new = RequestQueue(1, None), Arrivals()
    for start in (0.0, 1000.0):
        queue.append(new.next(5, arrival=start))
        queue.pop(start + 3.0)
    queue.append(new.next(5, arrival=2000.0))
    assert refused(queue, 5) == pytest.approx(3.0)


def test_retry_after_is_within_its_bounds() -> None:
    queue, new = RequestQueue(1, None), Arrivals()
    for _ in range(5):
        queue.append(new.next(5, arrival=0.0))
    queue.pop(0.001)
    assert refused(queue, 5) == 1.0
    queue.pop(10_000.0)
    assert refused(queue, 5) == MAX_RETRY_AFTER_S


def has_room(queue: RequestQueue, num_free_rows: int) -> bool:
    try:
        queue.check_room(1, num_free_rows)
    except QueueFullError:
        return False
    return True


def test_free_rows_that_cannot_be_used_do_not_count() -> None:
    queue, new = RequestQueue(2, None), Arrivals()
    sequences = [new.next() for _ in range(4)]
    for sequence in sequences[:3]:
        queue.append(sequence)
    assert has_room(queue, 8)
    queue.limit_starts(2)
    assert has_room(queue, 8)
    assert not has_room(queue, 1)
    queue.append(sequences[3])
    assert not has_room(queue, 8)


def test_starts_stay_limited_until_the_queue_is_empty() -> None:
    queue, new = RequestQueue(2, None), Arrivals()
    for _ in range(3):
        queue.append(new.next())
    queue.limit_starts(0)
    queue.limit_starts(8)
    assert not has_room(queue, 8), "a little room came back, and goes to those who wait"
    take_all(queue)
    for _ in range(3):
        queue.append(new.next())
    assert has_room(queue, 8)


def test_who_waits_elsewhere_without_room_counts() -> None:
    queue = RequestQueue(2, None)
    assert has_room(queue, -1)
    with pytest.raises(QueueFullError, match="2 requests are waiting and 0 can start; the queue takes 2"):
        queue.check_room(1, -2)
