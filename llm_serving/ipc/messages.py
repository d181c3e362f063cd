"""All messages between server and agent.

A message about a step contains the number of the step and the number of its slot. The arrays of the step are in the
slot. Messages are MessagePack maps with a ``type`` field, decoded against these classes. An unknown type, an unknown
field or a wrong value is a ``ProtocolError``.

    server                                agent
      | <------------------- Challenge -----|   a nonce
      |--- Connect ------------------------>|   proof of the launch secret, a nonce, the shared memory's name
      | <------------------- Connected -----|   proof of the agent; shared memory is mapped (the server unlinks it
      |                                     |   after every agent of the group has sent this)
      | <------------------- Progress ... --|   loading, compiling, warming up
      | <------------------- Ready | Failed-|
      |--- Prefill | Decode | Move -------->|   "run slot s as step n"
      |--- Bias --------------------------->|   the logit bias of the sequence in a batch row
      |--- Masks -------------------------->|   the masks of step n are in its slot
      | <------------------- StepDone ------|
      | <------------------- Unhealthy -----|   a self-check failed; the server restarts the agent
      |--- AdapterLoad ------------------->|   the LoRA adapter of an adapter slot
      | <------------------- AdapterLoaded -|
      |--- Abort | Status | Shutdown ------>|
      |--- ProfileStart | ProfileStop ----->|
      | <------------------- ProfileReply --|
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Annotated, TypeVar

import msgspec

from llm_serving.errors import ProtocolError

PROTOCOL_VERSION = 15
"""Version of the messages. Server and agent must have the same version."""
NONCE_BYTES = 16
"""Size in bytes of each random number (nonce) in the handshake."""
MASK_TIMEOUT_S = 30.0
"""Maximum wait of an agent for the masks of a step. The server normally writes them while the step computes its logits.
"""

UInt = Annotated[int, msgspec.Meta(ge=0)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]
LongText = Annotated[str, msgspec.Meta(max_length=64 * 1024)]


class MessageClass(enum.IntEnum):
    """Priority of a message in the agent's task queue. Smaller numbers run first.

    The scheduling policy may change the order of prefill and decode steps (``agent/task_queue.py``).
    """

    CONTROL = 0
    MOVE = 1
    PREFILL = 2
    DECODE = 3


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages."""


class Challenge(Message, frozen=True, tag="challenge"):
    """Agent to server, the first message: asks for a proof that the server launched this agent."""

    nonce: Nonce


class Connect(Message, frozen=True, tag="connect"):
    """Server to agent: the server's proof for the agent's nonce (see ``prove``), a nonce of the server, and the names
    of the shared memory.

    ``exchange_name`` is empty if the agent is alone in its group. ``pool_name`` is empty without KV tiers,
    ``tiles_name`` if the model reads no images, and ``hand_over_name`` if replicas have no roles.
    """

    version: int
    nonce: Nonce
    proof: Proof
    shm_name: ShortText
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    exchange_name: ShortText = ""
    pool_name: ShortText = ""
    tiles_name: ShortText = ""
    hand_over_name: ShortText = ""


class Connected(Message, frozen=True, tag="connected"):
    """Agent to server: the agent has mapped the shared memory. ``proof`` is its proof for the server's nonce."""

    proof: Proof


class Progress(Message, frozen=True, tag="progress"):
    """Agent to server during the start: ``done`` of ``total`` units of work of a stage (load, compile, warm up)."""

    stage: ShortText
    done: UInt
    total: UInt


class Ready(Message, frozen=True, tag="ready"):
    """Agent to server: the graphs are compiled, and the largest configured steps have run once.

    ``summary`` is for status pages and logs (device, op table, bytes of weights and KV cache, seconds of each stage).
    """

    summary: dict[str, str | int | float]


class Failed(Message, frozen=True, tag="failed"):
    """Agent to server: the start failed. ``error`` is one sentence."""

    error: LongText
    traceback: LongText


class Prefill(Message, frozen=True, tag="prefill"):
    """Server to agent: run slot ``slot`` as step ``seq``.

    The step has prompt tokens; a mixed step also has decode tokens. If ``overtakes`` is True, a single agent runs the
    step before all queued steps except moves. Agents of a group ignore it.
    """

    seq: UInt
    slot: UInt
    overtakes: bool = False


class Decode(Message, frozen=True, tag="decode"):
    """Server to agent: run slot ``slot`` as step ``seq``. The step has one token for each sequence."""

    seq: UInt
    slot: UInt


class Move(Message, frozen=True, tag="move"):
    """Server to agent: copy the blocks that slot ``slot`` names, as step ``seq``. The step has no tokens."""

    seq: UInt
    slot: UInt


class Masks(Message, frozen=True, tag="masks"):
    """Server to agent: all masks of step ``seq`` are in slot ``slot``. Sent once for each step with masks.

    ``biased_rows`` are the batch rows of this step whose logits get the bias of an earlier ``Bias`` message.
    """

    seq: UInt
    slot: UInt
    biased_rows: tuple[UInt, ...] = ()


class Bias(Message, frozen=True, tag="bias"):
    """Server to agent: the logit bias of the sequence that uses batch row ``row`` from now on.

    Sent before the first ``Masks`` message that has ``row`` in ``biased_rows`` for this sequence. ``token_ids`` (int32)
    and ``values`` (float32) are the bytes of arrays of the same length.
    """

    seq: UInt
    row: UInt
    token_ids: bytes
    values: bytes


class Abort(Message, frozen=True, tag="abort"):
    """Server to agent: drop step ``step`` if it has not begun. The agent replies with ``StepDone(aborted=True)``."""

    seq: UInt
    step: UInt


class Status(Message, frozen=True, tag="status"):
    """Server to agent: asks for a ``StatusReply``. The agent replies even while a step runs."""

    seq: UInt


class ProfileStart(Message, frozen=True, tag="profile_start"):
    """Server to agent: profile the following steps. The files go to a subfolder of ``folder``."""

    seq: UInt
    folder: LongText


class ProfileStop(Message, frozen=True, tag="profile_stop"):
    """Server to agent: end the profile and write its files."""

    seq: UInt


class OperatorTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of all launches of one kind of operator during a profile."""

    name: ShortText
    count: UInt
    total_ms: float


class ProfileReply(Message, frozen=True, tag="profile_reply"):
    """Agent to server: the profile has started or ended. ``error`` is empty on success.

    The other fields describe a profile that has ended. ``graph_us`` and ``sample_us`` are the microseconds that its
    ``steps`` steps spent in the graph and in the sampler. ``operators`` are the operators with the largest times.
    ``note`` explains how to read the files in ``folder``.
    """

    seq: UInt
    error: LongText = ""
    folder: LongText = ""
    steps: UInt = 0
    graph_us: UInt = 0
    sample_us: UInt = 0
    operators: Annotated[list[OperatorTime], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=list)
    note: LongText = ""


class AdapterLoad(Message, frozen=True, tag="adapter_load"):
    """Server to agent: copy the LoRA adapter in the shared memory ``shm_name`` into adapter slot ``adapter_slot``.

    No step in flight names this adapter slot.
    """

    seq: UInt
    adapter_slot: UInt
    shm_name: ShortText
    num_bytes: UInt


class AdapterLoaded(Message, frozen=True, tag="adapter_loaded"):
    """Agent to server: the reply to ``AdapterLoad`` with the same ``seq``. ``error`` is empty on success."""

    seq: UInt
    adapter_slot: UInt
    error: LongText = ""


class Shutdown(Message, frozen=True, tag="shutdown"):
    """Server to agent: end now. There is no reply; the connection closes."""

    seq: UInt


class StepDone(Message, frozen=True, tag="step_done"):
    """Agent to server: step ``seq`` has run and its results are in its slot, or it was aborted before it began.

    ``queue_us``, ``graph_us`` and ``sample_us`` are the microseconds that the step spent in the task queue, in the
    graph and in the sampler. ``graph_us`` includes the block moves before the graph. ``fetched_bytes`` is the number of
    bytes that were copied from the device to choose the tokens. ``draft_us`` is the time of the draft model, a part of
    ``sample_us``. ``device_draws`` is the number of tokens that the device drew and with which this step was launched.
    Tokens of sequences without ``top_k`` are not counted. ``wrong_draws`` is the number of these tokens that the
    sampler has not chosen. ``second_launches`` is 1 if this step was launched again, otherwise 0.
    """

    seq: UInt
    slot: UInt
    aborted: bool = False
    queue_us: UInt = 0
    graph_us: UInt = 0
    sample_us: UInt = 0
    fetched_bytes: UInt = 0
    draft_us: UInt = 0
    device_draws: UInt = 0
    wrong_draws: UInt = 0
    second_launches: UInt = 0


class StepFailed(Message, frozen=True, tag="step_failed"):
    """Agent to server: step ``seq`` failed. The agent continues. The step's requests end with this error.

    ``only_sampling`` is True if an agent of a group has run its whole part of the step, and only then failed to sample.
    So the other agents of the group need not wait for it in this step or in later ones.
    """

    seq: UInt
    slot: UInt
    error: LongText
    only_sampling: bool = False


class Unhealthy(Message, frozen=True, tag="unhealthy"):
    """Agent to server: step ``seq`` failed a self-check, so the agent must be restarted. The step has no result."""

    seq: UInt
    slot: UInt
    error: LongText


class StatusReply(Message, frozen=True, tag="status_reply"):
    """Agent to server: the number of steps since the start of the agent, the number of queued steps, and its resident
    memory in bytes.
    """

    seq: UInt
    steps: UInt
    queued: UInt
    rss_bytes: UInt


Step = Prefill | Decode | Move
"""A message that starts a step in a slot. The agent replies with ``StepDone`` or ``StepFailed``."""

ServerMessage = (
    Connect
    | Prefill
    | Decode
    | Move
    | Masks
    | Bias
    | Abort
    | Status
    | ProfileStart
    | ProfileStop
    | AdapterLoad
    | Shutdown
)
AgentMessage = (
    Challenge
    | Connected
    | Progress
    | Ready
    | Failed
    | StepDone
    | StepFailed
    | Unhealthy
    | StatusReply
    | ProfileReply
    | AdapterLoaded
)

_M = TypeVar("_M")
_ENCODER = msgspec.msgpack.Encoder()
_SERVER_DECODER = msgspec.msgpack.Decoder(ServerMessage)
_AGENT_DECODER = msgspec.msgpack.Decoder(AgentMessage)


def message_class(message: ServerMessage) -> MessageClass:
    """Returns the priority class of a message to the agent."""
    if isinstance(message, Move):
        return MessageClass.MOVE
    if isinstance(message, Prefill):
        return MessageClass.PREFILL
    if isinstance(message, Decode):
        return MessageClass.DECODE
    return MessageClass.CONTROL


def encode(message: Message) -> bytes:
    """Returns the bytes of a message, without the length that a frame begins with."""
    return _ENCODER.encode(message)


def decode_server_message(payload: bytes) -> ServerMessage:
    """Returns the message that the server sent. Raises ProtocolError if the payload does not match the schema."""
    message: ServerMessage = _decode(_SERVER_DECODER, payload)
    return message


def decode_agent_message(payload: bytes) -> AgentMessage:
    """Returns the message that an agent sent. Raises ProtocolError if the payload does not match the schema."""
    message: AgentMessage = _decode(_AGENT_DECODER, payload)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[_M], payload: bytes) -> _M:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a frame of {len(payload)} bytes is not a known message: {error}") from error


def prove(secret: bytes, role: str, nonce: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the peer's nonce, keyed with the launch secret.

    ``role`` names the sender, so that a proof of one side is no proof of the other side.
    """
    return hmac.new(secret, role.encode() + b":" + nonce, hashlib.sha256).digest()


def check_proof(secret: bytes, role: str, nonce: bytes, proof: bytes) -> None:
    """Raises ProtocolError unless ``proof`` equals the result of ``prove``."""
    if not hmac.compare_digest(prove(secret, role, nonce), proof):
        raise ProtocolError(f"the {role} did not prove the launch secret; connection refused")
