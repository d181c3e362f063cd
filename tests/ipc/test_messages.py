"""Tests messages between server and agents.

Decoding an encoded message gives the same message; bad bytes are refused.
"""

import msgspec
import pytest

from llm_serving.errors import ProtocolError
from llm_serving.ipc import messages
from llm_serving.ipc.messages import MessageClass

NONCE = b"n" * messages.NONCE_BYTES

SERVER_MESSAGES = [
    messages.Connect(version=1, nonce=NONCE, proof=b"p" * 32, shm_name="llm-serving-00", num_slots=8),
    messages.Prefill(seq=1, slot=0),
    messages.Prefill(seq=1, slot=0, overtakes=True),
    messages.Decode(seq=2, slot=7),
    messages.Move(seq=3, slot=1),
    messages.Abort(seq=3, step=1),
    messages.Status(seq=5),
    messages.Shutdown(seq=6),
]
AGENT_MESSAGES = [
    messages.Challenge(nonce=NONCE),
    messages.Connected(proof=b"p" * 32),
    messages.Progress(stage="load weights", done=1, total=3),
    messages.Ready(summary={"device": "CPU", "threads": 2, "seconds": 1.5}),
    messages.Failed(error="no", traceback="where"),
    messages.StepDone(seq=1, slot=0, queue_us=5, graph_us=6, device_draws=9, wrong_draws=2, second_launches=1),
    messages.StepFailed(seq=1, slot=0, error="no"),
    messages.StatusReply(seq=5, steps=3, queued=0, rss_bytes=1),
]


@pytest.mark.parametrize("message", SERVER_MESSAGES, ids=lambda m: type(m).__name__)
def test_server_messages_come_back_equal(message):
    assert messages.decode_server_message(messages.encode(message)) == message


@pytest.mark.parametrize("message", AGENT_MESSAGES, ids=lambda m: type(m).__name__)
def test_agent_messages_come_back_equal(message):
    assert messages.decode_agent_message(messages.encode(message)) == message


@pytest.mark.parametrize("message", AGENT_MESSAGES, ids=lambda m: type(m).__name__)
def test_an_agent_message_is_refused_where_a_server_message_is_expected(message):
    with pytest.raises(ProtocolError, match="not a known message"):
        messages.decode_server_message(messages.encode(message))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"hello",
        b"\xc1" * 40,
        msgspec.msgpack.encode({"type": "prefill"}),
        msgspec.msgpack.encode({"type": "prefill", "seq": -1, "slot": 0}),
        msgspec.msgpack.encode({"type": "prefill", "seq": "1", "slot": 0}),
        msgspec.msgpack.encode({"type": "prefill", "seq": 1, "slot": 0, "more": 1}),
        msgspec.msgpack.encode({"type": "prefill", "seq": 1.5, "slot": 0}),
        msgspec.msgpack.encode({"type": "exec", "seq": 1}),
        msgspec.msgpack.encode([1, 2, 3]),
        messages.encode(messages.Prefill(seq=1, slot=0)) + b"\x00",
    ],
)
def test_malformed_messages_are_refused(payload):
    with pytest.raises(ProtocolError, match="not a known message"):
        messages.decode_server_message(payload)


def test_message_classes_have_the_order_control_move_prefill_decode():
    classes = [messages.message_class(message) for message in SERVER_MESSAGES]
    steps = [MessageClass.PREFILL, MessageClass.PREFILL, MessageClass.DECODE, MessageClass.MOVE]
    assert classes == [MessageClass.CONTROL, *steps, *[MessageClass.CONTROL] * 3]
    assert MessageClass.CONTROL < MessageClass.MOVE < MessageClass.PREFILL < MessageClass.DECODE


def is_accepted(secret, role, nonce, proof):
    try:
        messages.check_proof(secret, role, nonce, proof)
    except ProtocolError:
        return False
    return True


def test_a_proof_holds_for_one_secret_role_and_nonce(record_property):
    proof = messages.prove(b"s" * 32, "server", NONCE)
    messages.check_proof(b"s" * 32, "server", NONCE, proof)
    others = [(b"t" * 32, "server", NONCE), (b"s" * 32, "agent", NONCE), (b"s" * 32, "server", b"")]
    record_property("accepted_strangers", f"{sum(is_accepted(*other, proof) for other in others)} of {len(others)}")
    for other in others:
        with pytest.raises(ProtocolError, match="did not prove"):
            messages.check_proof(*other, proof)
