"""Fuzz cases for the frames between server and agent: streams of nearly valid messages, in both directions.

A case makes a few messages, changes values, bytes or lengths, and gives the stream to the receiver in random pieces.
The receiver must decode the stream, or raise ProtocolError or AgentLostError. Each decoded message is passed to the
code that first handles it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from agent.task_queue import TaskQueue
from llm_serving.config import load_config
from llm_serving.errors import AgentLostError, ProtocolError
from llm_serving.executor.step_slots import StepSlots
from llm_serving.ipc import messages
from llm_serving.ipc.channel import MAX_FRAME_BYTES, FrameBuffer, frame
from llm_serving.ipc.shm import NUM_SLOTS, SlotLayout, StepSlot
from support.executor_steps import prefill
from support.fuzzing import Findings, peak_mib
from support.mutations import INTEGERS, mutate_bytes, mutate_value

_NONCE = b"n" * messages.NONCE_BYTES
_TO_AGENT: tuple[messages.Message, ...] = (
    messages.Connect(version=5, nonce=_NONCE, proof=b"p" * 32, shm_name="llm-serving-1x2", num_slots=8),
    messages.Prefill(seq=1, slot=0),
    messages.Decode(seq=2, slot=7),
    messages.Move(seq=3, slot=1),
    messages.Abort(seq=4, step=1),
    messages.Status(seq=5),
    messages.ProfileStart(seq=6, folder="output/profiles/a"),
    messages.ProfileStop(seq=7),
    messages.Shutdown(seq=8),
)
_TO_SERVER: tuple[messages.Message, ...] = (
    messages.Challenge(nonce=_NONCE),
    messages.Connected(proof=b"p" * 32),
    messages.Progress(stage="load weights", done=1, total=3),
    messages.Ready(summary={"device": "CPU", "threads": 2, "seconds": 1.5}),
    messages.Failed(error="no", traceback="where"),
    messages.StepDone(seq=1, slot=0, queue_us=5, graph_us=6, device_draws=9, wrong_draws=2, second_launches=1),
    messages.StepFailed(seq=1, slot=0, error="no"),
    messages.StatusReply(seq=5, steps=3, queued=0, rss_bytes=1),
    messages.ProfileReply(seq=6, operators=[messages.OperatorTime(name="MatMul", count=3, total_ms=1.5)]),
)
_CONFIG = load_config("llama_tiny_cpu.yaml", ["model_config.decode_batch_size=[4]"])
_LAYOUT = SlotLayout.of(_CONFIG.slot_limits())
_SLOTS = [StepSlot(_LAYOUT, bytearray(_LAYOUT.slot_bytes)) for _ in range(NUM_SLOTS)]
_CONTROL = messages.Connect | messages.Abort | messages.Status
"""Messages that the agent's socket thread handles itself, so they never reach the queue."""


def fuzz_frames(cases: int, seed: int) -> dict[str, Findings]:
    """Runs ``cases`` streams in each direction. Returns the findings by direction."""
    found = {}
    for direction, receive in (("to_agent", _agent_receives), ("to_server", _server_receives)):
        findings = found[direction] = Findings()
        # A first run creates the objects that later runs reuse. The memory of these objects does not count as growth.
        run_case(direction, seed, Findings(), receive)
        before = peak_mib()
        for number in range(cases):
            run_case(direction, seed + number, findings, receive)
        findings.growth_mib = peak_mib() - before
    return found


def run_case(direction: str, seed: int, findings: Findings, receive: Callable[[random.Random, bytes], None]) -> None:
    """Runs the case of one seed: makes its stream and gives it to the receiver."""
    rng = random.Random(f"{direction} {seed}")
    stream = make_stream(rng, _TO_AGENT if direction == "to_agent" else _TO_SERVER)
    findings.run(f"{direction} {seed}", lambda: receive(rng, stream), (ProtocolError, AgentLostError))


def make_stream(rng: random.Random, kinds: tuple[messages.Message, ...]) -> bytes:
    """Returns the bytes of one to four messages with changes in values, bytes or lengths. A few streams are valid."""
    frames = []
    for _ in range(rng.randint(1, 4)):
        payload = msgspec.msgpack.encode(_message(rng, rng.choice(kinds)))
        if rng.random() < 0.3:
            payload = mutate_bytes(rng, payload)
        frames.append(frame(payload[:MAX_FRAME_BYTES]) if rng.random() < 0.9 else _wrong_length(rng, payload))
    if rng.random() < 0.1:
        rng.shuffle(frames)
    stream = b"".join(frames)
    return mutate_bytes(rng, stream) if rng.random() < 0.2 else stream


def _message(rng: random.Random, message: messages.Message) -> Any:
    value: Any = msgspec.to_builtins(message, builtin_types=(bytes,))
    for name in ("seq", "slot", "step"):
        if name in value and rng.random() < 0.5:
            value[name] = rng.randrange(NUM_SLOTS + 2)
    return mutate_value(rng, value) if rng.random() < 0.5 else value


def _wrong_length(rng: random.Random, payload: bytes) -> bytes:
    length = rng.choice((0, len(payload) - 1, len(payload) + 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, *INTEGERS))
    return struct.pack("<I", length & 0xFFFFFFFF) + payload


def _payloads(rng: random.Random, stream: bytes) -> list[bytes]:
    """Gives the stream to a frame buffer in pieces and returns the decoded frames.

    The buffer must never keep more bytes than one frame has.
    """
    buffer, found, piece = FrameBuffer(), [], rng.choice((1, 7, 64, 4096, 65536))
    for start in range(0, len(stream), piece):
        found += list(buffer.feed(stream[start : start + piece]))
        assert len(buffer._data) <= MAX_FRAME_BYTES + 4
    return found


def _agent_receives(rng: random.Random, stream: bytes) -> None:
    """Decodes the stream and queues the messages, as an agent does after the handshake."""
    queue = TaskQueue("prefill_first", NUM_SLOTS)
    for payload in _payloads(rng, stream):
        message = messages.decode_server_message(payload)
        if isinstance(message, messages.Abort):
            queue.remove_step(message.step)
        elif not isinstance(message, _CONTROL):
            queue.put(message)
    for _ in range(queue.num_steps):
        queue.get()


def _server_receives(rng: random.Random, stream: bytes) -> None:
    """Decodes the stream and takes replies to steps, as the server does. Some of these steps are in flight."""
    slots = StepSlots(_CONFIG.slot_limits(), _CONFIG.pa_config.block_size, range(1), _SLOTS)
    for seq in range(4):
        slots.write(prefill(seq, 5, row=seq))
    for payload in _payloads(rng, stream):
        message = messages.decode_agent_message(payload)
        if isinstance(message, messages.StepDone | messages.StepFailed):
            slots.take(0, message)
    assert len(slots.free_slots) + len(slots.slot_of) == NUM_SLOTS
