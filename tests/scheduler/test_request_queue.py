from __future__ import annotations

from fakes import make_request

from llm_serving.scheduler.request_queue import RequestQueue
from llm_serving.scheduler.sequence import Sequence


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
