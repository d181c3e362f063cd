"""Tests frames that arrive over a socket pair, for any division of their bytes into pieces."""

import socket
import struct

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
