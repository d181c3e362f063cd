"""Tests frames that arrive over a socket pair, for any division of their bytes into pieces."""

import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.errors import ProtocolError
from llm_serving.ipc.channel import MAX_FRAME_BYTES, Channel, FrameBuffer, frame


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_are_the_same_for_any_division_of_the_stream(payloads, piece):
    stream = b"".join(frame(payload) for payload in payloads)
    buffer = FrameBuffer()
    found = [p for start in range(0, len(stream), piece) for p in buffer.feed(stream[start : start + piece])]
    assert found == payloads
    assert not buffer._data


def test_the_rest_of_a_frame_is_no_frame_of_its_own():
    buffer, inner = FrameBuffer(), frame(b"x")
    stream = frame(b"one" + inner)
    assert list(buffer.feed(stream[: -len(inner)])) == []
    assert list(buffer.feed(inner)) == [b"one" + inner]


def test_a_length_over_the_limit_is_refused_before_the_payload_arrives():
    with pytest.raises(ProtocolError, match=f"announces {MAX_FRAME_BYTES + 1} bytes; the limit is {MAX_FRAME_BYTES}"):
        list(FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))


def test_a_payload_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        frame(bytes(MAX_FRAME_BYTES + 1))


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    left_channel, right_channel = Channel(left), Channel(right)
    yield left_channel, right_channel
    left_channel.close()
    right_channel.close()


def test_receive_available_does_not_wait_for_more(pair):
    left, right = pair
    left.send(b"one")
    left.send(b"two")
    left.send(b"")
    assert right.receive_available() == [b"one", b"two", b""]
    left.close()
    assert right.receive_available() is None


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_frame_that_is_larger_than_the_free_space_of_the_socket_is_sent_completely(pair, seconds):
    left, right = pair
    left.set_timeout(seconds)
    payload = bytes(range(256)) * (MAX_FRAME_BYTES // 256)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(lambda: [left.send(payload) for _ in range(8)])
        found = []
        while len(found) < 8:
            found += right.receive_available()
        sent.result()
    assert found == [payload] * 8


def test_a_peer_that_never_reads_ends_a_send_with_a_timeout(pair):
    left, _ = pair
    left.set_timeout(0.01)

    def send_many():
        for _ in range(64):
            left.send(bytes(MAX_FRAME_BYTES))

    with pytest.raises(TimeoutError):
        send_many()


def test_a_socket_with_a_timeout_is_waited_for(pair):
    left, right = pair
    right.set_timeout(0.01)
    with pytest.raises(TimeoutError):
        right.receive_available()
    right.set_timeout(0.0)
    with pytest.raises(BlockingIOError):
        right.receive_available()
    right.set_timeout(60.0)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(right.receive_available)
        left.send(b"one")
        assert found.result() == [b"one"]
