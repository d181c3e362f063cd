"""Tests the order in which an agent handles its queued messages."""

import threading

import pytest

from agent.task_queue import Idle, StepComputed, TaskQueue
from llm_serving.errors import ProtocolError
from llm_serving.ipc.messages import Decode, Move, Prefill, Shutdown


def drain(queue):
    return [queue.get()[0] for _ in range(len(queue._heap))]


MIXED = [
    Decode(seq=1, slot=0),
    Prefill(seq=2, slot=1),
    Decode(seq=3, slot=2),
    Prefill(seq=4, slot=3),
    Shutdown(seq=5),
]


def test_prefill_first_runs_control_then_prefill_then_decode_each_in_order():
    queue = TaskQueue("prefill_first", max_steps=8)
    for message in MIXED:
        queue.put(message)
    assert [message.seq for message in drain(queue)] == [5, 2, 4, 1, 3]


def test_decode_first_runs_control_then_decode_then_prefill_each_in_order():
    queue = TaskQueue("decode_first", max_steps=8)
    for message in MIXED:
        queue.put(message)
    assert [message.seq for message in drain(queue)] == [5, 1, 3, 2, 4]


@pytest.mark.parametrize("policy", ["fcfs", "chunked", "slo"])
def test_other_policies_run_control_then_steps_in_order(policy):
    queue = TaskQueue(policy, max_steps=8)
    for message in MIXED:
        queue.put(message)
    assert [message.seq for message in drain(queue)] == [5, 1, 2, 3, 4]


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "fcfs"])
def test_moves_run_before_all_steps_and_after_control(policy):
    queue = TaskQueue(policy, max_steps=8)
    for message in (*MIXED[:4], Move(seq=5, slot=4), Move(seq=6, slot=5), Shutdown(seq=1)):
        queue.put(message)
    assert [message.seq for message in drain(queue)][:3] == [1, 5, 6]


def test_moves_count_as_steps():
    queue = TaskQueue("fcfs", max_steps=1)
    queue.put(Move(seq=1, slot=0))
    with pytest.raises(ProtocolError, match="1 steps are queued already"):
        queue.put(Move(seq=2, slot=1))
    assert queue.num_steps == 1


def test_step_numbers_must_increase():
    queue = TaskQueue("fcfs", max_steps=8)
    queue.put(Prefill(seq=3, slot=0))
    with pytest.raises(ProtocolError, match="step 3 came after step 3"):
        queue.put(Decode(seq=3, slot=0))


def test_more_steps_than_slots_are_refused():
    queue = TaskQueue("fcfs", max_steps=2)
    queue.put(Prefill(seq=1, slot=0))
    queue.put(Prefill(seq=2, slot=1))
    with pytest.raises(ProtocolError, match="2 steps are queued already; there are 2 slots"):
        queue.put(Decode(seq=3, slot=0))
    queue.put(Shutdown(seq=4))
    assert queue.get()[0] == Shutdown(seq=4)
    assert queue.get()[0] == Prefill(seq=1, slot=0)
    queue.put(Decode(seq=5, slot=0))
    assert queue.num_steps == 2
    assert queue.steps_taken == 1


def test_a_waiting_step_can_be_removed_once():
    queue = TaskQueue("prefill_first", max_steps=8)
    for message in MIXED[:4]:
        queue.put(message)
    assert queue.remove_step(2) == Prefill(seq=2, slot=1)
    assert queue.remove_step(2) is None
    assert queue.remove_step(99) is None
    assert [message.seq for message in drain(queue)] == [4, 1, 3]


def test_get_waits_for_a_message_and_returns_its_waiting_time():
    queue = TaskQueue("fcfs", max_steps=8)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(queue.get()))
    thread.start()
    queue.put(Decode(seq=1, slot=0))
    thread.join(timeout=5)
    message, waited_us = taken[0]
    assert message == Decode(seq=1, slot=0)
    assert 0 <= waited_us < 5_000_000


@pytest.mark.parametrize("policy", ["fcfs", "chunked", "slo"])
def test_a_prefill_that_overtakes_runs_after_moves_and_before_all_other_steps(policy):
    queue = TaskQueue(policy, max_steps=8)
    for message in (*MIXED[:4], Prefill(seq=5, slot=4, overtakes=True), Prefill(seq=6, slot=5, overtakes=True),
                    Move(seq=7, slot=6), Shutdown(seq=8)):  # fmt: skip
        queue.put(message)
    assert [message.seq for message in drain(queue)] == [8, 7, 5, 6, 1, 2, 3, 4]


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "fcfs"])
def test_agents_of_a_group_keep_the_servers_order(policy):
    """Only Shutdown may overtake other messages, so every agent runs the same steps in the same order."""
    queue = TaskQueue(policy, max_steps=8, in_order=True)
    for message in (*MIXED[:4], Move(seq=5, slot=4), Prefill(seq=6, slot=5, overtakes=True), Shutdown(seq=7)):
        queue.put(message)
    assert [message.seq for message in drain(queue)] == [7, 1, 2, 3, 4, 5, 6]


def test_messages_come_before_computed_steps_and_each_computed_step_wakes_the_thread_once():
    queue = TaskQueue("fcfs", max_steps=8)
    queue.step_computed()
    queue.step_computed()
    queue.put(Decode(seq=1, slot=0))
    assert [type(queue.get()[0]) for _ in range(3)] == [Decode, StepComputed, StepComputed]


def test_a_queue_without_messages_reports_that_the_agent_is_idle():
    queue = TaskQueue("fcfs", max_steps=8)
    assert isinstance(queue.get(0.0)[0], Idle)
    queue.step_computed()
    assert isinstance(queue.get(0.0)[0], StepComputed)
    queue.put(Decode(seq=1, slot=0))
    assert queue.get(0.0)[0] == Decode(seq=1, slot=0)
    assert isinstance(queue.get(0.001)[0], Idle)
