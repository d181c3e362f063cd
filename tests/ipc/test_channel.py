"""Frames over a socket pair, for any division of the bytes."""

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
    assert buffer.pending_bytes == 0


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


def test_receive_gives_frames_in_order_then_none(pair):
    left, right = pair
    left.send(b"one")
    left.send(b"")
    left.send(b"three")
    assert [right.receive(), right.receive(), right.receive()] == [b"one", b"", b"three"]
    left.close()
    assert right.receive() is None


def test_closing_inside_a_frame_is_an_error():
    left, right = socket.socketpair()
    channel = Channel(right)
    left.sendall(struct.pack("<I", 10) + b"half")
    left.close()
    with pytest.raises(ProtocolError, match="inside a frame"):
        channel.receive()
    channel.close()


def test_receive_available_does_not_wait_for_more(pair):
    left, right = pair
    left.send(b"one")
    left.send(b"two")
    assert right.receive_available() == [b"one", b"two"]
