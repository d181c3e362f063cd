"""Tests damaged streams of messages in both directions. tests/long/fuzz_frames.py runs many more."""

import random

import pytest

from agent.task_queue import TaskQueue
from llm_serving.ipc.messages import ProfileStart, ProfileStop
from support import frame_fuzz
from support.frame_fuzz import fuzz_frames
from support.fuzzing import Findings


def test_damaged_streams_are_decoded_or_refused():
    for direction, findings in fuzz_frames(1500, seed=20_000_000).items():
        assert findings.crashes == {}, direction
        assert findings.is_good
        assert min(findings.accepted, findings.refused) > 150, "the changes are too weak or too strong"


def test_control_messages_with_equal_numbers_run_in_the_order_of_their_arrival():
    queue = TaskQueue("prefill_first", 8)
    sent = [ProfileStop(seq=3), ProfileStart(seq=3, folder="a"), ProfileStop(seq=3)]
    for message in sent:
        queue.put(message)
    assert [queue.get()[0] for _ in sent] == sent


@pytest.mark.parametrize("error", [IndexError("planted"), MemoryError("planted")])
def test_an_error_outside_the_protocol_is_a_finding(error):
    def receive(rng: random.Random, stream: bytes) -> None:
        raise error

    findings = Findings()
    frame_fuzz.run_case("to_agent", 1, findings, receive)
    assert (findings.crashed, findings.is_good) == (1, False)
    assert "planted" in next(iter(findings.crashes.values()))
