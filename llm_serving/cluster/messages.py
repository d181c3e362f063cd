"""The messages and frames of a link between the server and a node.

A link carries the messages between server and agents (``llm_serving.ipc.messages``) unchanged. In addition, it has
messages of its own, about the node and about all its agents together:

    server                                node (agent_host)
      |--- Hello ------------------------>|   version and code of the server
      | <--------------- Welcome | Refused|
      |--- Start ------------------------>|   the config, the digests of model files, and the node's share of a group
      | <------------------------ ClusterAt|   only from the first node of a group that spans several nodes; the server
      |                                   |   then starts the agents of its other nodes
      | <------------- Refused | Progress |
      | <--------------------- GroupReady |   every agent is ready
      |--- steps and other messages ----->|
      | <------------- messages of agents |
      | <-------------------------- Quiet |   only from a node of a group that spans several nodes: its agents sleep
      | <---------------------- GroupLost |   the agents have ended; the node then closes the link
      |--- SendBlocks ------------------->|   send blocks of the hand-over pools to another node
      | <---------------------- BlocksSent |
      |--- LoadAdapter ------------------>|   a LoRA adapter for the agents
      | <--------------------- WantAdapter |   send the next bytes of this adapter; only if the node does not have it
      |--- AdapterPart ... -------------->|
      |--- TilePart ... ----------------->|   pixels of an image, before the first step that reads them
      |--- End -------------------------->|   end the agents without an error; the node then closes the link
      |<-- Beat ------------------- Beat->|   every ``BEAT_S``, in both directions

Content of a frame: one byte with its kind, then
    CONTROL    a message of this module
    MESSAGE    the number of an agent in the group (one byte), the length of the message (4 bytes, little-endian), a
               message of ``llm_serving.ipc.messages``, and, for some messages, the contents of a step slot
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from llm_serving.config.parallel_section import MAX_SENT_BLOCKS
from llm_serving.errors import ProtocolError
from llm_serving.ipc.messages import LongText, ShortText, UInt

LINK_VERSION = 8
"""Version of the messages of a link. Server and node must have the same version."""
BEAT_S = 0.5
"""Seconds between two signs of life (messages ``Beat``)."""
SERVER_PATIENCE_S = 2.4
"""Seconds of silence after which the server counts a node as lost."""
NODE_PATIENCE_S = 5.0
"""Seconds of silence of the server after which a node ends its agents.

This time is longer than ``SERVER_PATIENCE_S``, so that a short pause of the server does not restart the agents.
"""
HANDSHAKE_TIMEOUT_S = 5.0
"""Maximum seconds that each side waits for a message of the handshake."""
MAX_CONFIG_BYTES = 192 * 1024
"""Maximum size of the config that the server sends to a node, as JSON."""
SECRET_BYTES = 32
"""Size of each secret in the messages of a link, in bytes."""
DIGEST_BYTES = 32
"""Size of the SHA-256 of a LoRA adapter, in bytes."""
PART_BYTES = 128 * 1024
"""Maximum bytes of an adapter or of a tile in one frame."""
PIECE_BYTES = 4 * PART_BYTES
"""Bytes of an adapter that a node asks for at a time. Steps in the same link wait for at most one piece."""
_PAIR = struct.Struct("<II")

CONTROL, MESSAGE = 0, 1
_HEADER = struct.Struct("<BBI")


class LinkMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages of a link."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The versions of a program and the digest of its code. The programs at both ends of a link must have equal
    versions and digests.
    """

    version: ShortText
    """Version of the package."""
    link: UInt
    """Version of the link's messages, ``LINK_VERSION``."""
    protocol: UInt
    """Version of the messages between server and agents."""
    code: ShortText
    """Digest of the Python code of server and agents."""


class Hello(LinkMessage, frozen=True, tag="hello"):
    """Server to node, the first message."""

    program: Program


class Welcome(LinkMessage, frozen=True, tag="welcome"):
    """Node to server: the node is free and has the same program."""

    program: Program
    host: ShortText
    """Name of the machine."""
    pid: UInt
    memory_bytes: UInt
    """Bytes of host memory that new processes may use on the node's machine."""
    memory_from: ShortText
    """The source of ``memory_bytes``, as a text: the machine's free memory, or the limit of its control group."""
    cores: UInt
    pool: ShortText = ""
    """The pool by prompt length whose replicas the node serves (``--pool``). Empty: the pools that no node names."""


class Refused(LinkMessage, frozen=True, tag="refused"):
    """Node to server: the node does not serve this server. ``reason`` names the difference between the programs, or the
    problem.

    ``is_busy``: the node serves another link, so it may be free later.
    """

    reason: LongText
    is_busy: bool = False


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host and a port."""

    host: ShortText
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's share of a group that spans several nodes. Each node has the same number of agents, in order of rank."""

    number: UInt
    """Number of the node among ``nodes``."""
    nodes: Annotated[list[Place], msgspec.Meta(min_length=2, max_length=256)]
    """The addresses at which the nodes reach each other."""
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    """The secret of this run of the group. A node must know it to send data to another node."""
    cluster: Place | None = None
    """The address at which agents on Ascend devices find each other. The first node of the group chooses it.

    None in the message to the first node, and on a CPU.
    """

    def members(self, group_size: int, number: int) -> range:
        """Returns the numbers of the agents of one node in a group of ``group_size`` agents."""
        count = group_size // len(self.nodes)
        return range(number * count, (number + 1) * count)


class Start(LinkMessage, frozen=True, tag="start"):
    """Server to node: start the agents of a replica, or the node's ``share`` of them.

    ``model`` describes the files of the model, see ``llm_serving.cluster.program.model_files``.
    """

    config_json: Annotated[str, msgspec.Meta(max_length=MAX_CONFIG_BYTES)]
    model: Annotated[dict[str, ShortText], msgspec.Meta(max_length=65536)]
    share: Share | None = None


class ClusterAt(LinkMessage, frozen=True, tag="cluster_at"):
    """First node of a group to server: the address at which the group's agents find each other.

    ``place`` is None on a CPU, where the agents need no address.
    """

    place: Place | None


class Progress(LinkMessage, frozen=True, tag="progress"):
    """Node to server during the start: agent number ``member`` has completed ``done`` of ``total`` units of work of a
    stage.
    """

    member: UInt
    stage: ShortText
    done: UInt
    total: UInt


class GroupReady(LinkMessage, frozen=True, tag="group_ready"):
    """Node to server: every agent is ready. The lists are in order of rank."""

    summaries: Annotated[list[dict[str, str | int | float]], msgspec.Meta(max_length=256)]
    pids: Annotated[list[UInt], msgspec.Meta(max_length=256)]
    secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)] = b""
    """The secret that other nodes must know to send KV blocks to this node. Empty if the node has no hand-over pools.
    """
    pool_secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)] = b""
    """The secret that the server must know to use the host blocks of this node. Empty without KV tiers."""


class Quiet(LinkMessage, frozen=True, tag="quiet"):
    """Node to server, in a group that spans nodes: whether all agents of the node are quiet. They are quiet if they
    have slept for longer than their step may take, and no data of other nodes has arrived meanwhile. If the agents of
    all nodes are quiet, the group hangs.
    """

    is_quiet: bool


class GroupLost(LinkMessage, frozen=True, tag="group_lost"):
    """Node to server: an agent has failed, so the node ends all agents of the group."""

    error: LongText


class SendBlocks(LinkMessage, frozen=True, tag="send_blocks"):
    """Server to node: send blocks of the hand-over pools to the node at ``host`` and ``port``.

    ``secret`` is the secret that the other node has sent in its ``GroupReady``.
    """

    number: UInt
    host: ShortText
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    packed_pairs: Annotated[bytes, msgspec.Meta(min_length=_PAIR.size, max_length=MAX_SENT_BLOCKS * _PAIR.size)]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs (own block, block of the other node). Raises ProtocolError if the last pair is not complete."""
        if len(self.packed_pairs) % _PAIR.size:
            raise ProtocolError(f"pairs of blocks have {len(self.packed_pairs)} bytes; a pair has {_PAIR.size}")
        return [(source, target) for source, target in _PAIR.iter_unpack(self.packed_pairs)]


def pack_pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    """Returns the bytes of ``SendBlocks.packed_pairs``."""
    return b"".join(_PAIR.pack(*pair) for pair in pairs)


class BlocksSent(LinkMessage, frozen=True, tag="blocks_sent"):
    """Node to server: a ``SendBlocks`` has ended. ``error`` is empty if all blocks are in the other node's pools."""

    number: UInt
    error: LongText


class LoadAdapter(LinkMessage, frozen=True, tag="load_adapter"):
    """Server to node: load a LoRA adapter into slot ``slot`` of all agents. ``digest`` is the SHA-256 of its bytes.

    Each agent replies with an ``AdapterLoaded`` of ``llm_serving.ipc.messages`` with the same ``seq``.
    """

    seq: UInt
    slot: UInt
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]


class WantAdapter(LinkMessage, frozen=True, tag="want_adapter"):
    """Node to server: send bytes of the adapter of ``LoadAdapter`` number ``seq``, from byte ``begin`` on."""

    seq: UInt
    begin: UInt
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=PIECE_BYTES)]


class AdapterPart(LinkMessage, frozen=True, tag="adapter_part"):
    """Server to node: bytes of the adapter of ``LoadAdapter`` number ``seq``, from byte ``begin`` on."""

    seq: UInt
    begin: UInt
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PART_BYTES)]


class TilePart(LinkMessage, frozen=True, tag="tile_part"):
    """Server to node: bytes of the tile with the index ``place`` in the memory of tiles, from byte ``begin`` on."""

    place: UInt
    begin: UInt
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PART_BYTES)]


class End(LinkMessage, frozen=True, tag="end"):
    """Server to node: end the agents, because the server stops or no longer needs them. This is not an error."""


class Beat(LinkMessage, frozen=True, tag="beat"):
    """A sign of life, in both directions."""


ToNode = Hello | Start | SendBlocks | LoadAdapter | AdapterPart | TilePart | End | Beat
ToServer = Welcome | Refused | ClusterAt | Progress | GroupReady | Quiet | GroupLost | BlocksSent | WantAdapter | Beat

_ENCODER = msgspec.msgpack.Encoder()
_NODE_DECODER = msgspec.msgpack.Decoder(ToNode)
_SERVER_DECODER = msgspec.msgpack.Decoder(ToServer)


class Carried(msgspec.Struct, frozen=True):
    """A message that a link has carried between the server and an agent. ``payload`` is the encoded message."""

    member: int
    payload: memoryview
    contents: memoryview
    """The contents of a step slot that belong to the message. Empty for most messages."""


def control(message: LinkMessage) -> bytes:
    """Returns the content of a frame with a link message, which is a message of this module."""
    return bytes((CONTROL,)) + _ENCODER.encode(message)


BEAT = control(Beat())


def carry(payload: bytes, member: int = 0, contents: bytes = b"") -> bytes:
    """Returns the content of a frame with a message between the server and agent number ``member`` of the group.
    ``contents`` are the bytes of a step slot that belong to the message.
    """
    return b"".join((_HEADER.pack(MESSAGE, member, len(payload)), payload, contents))


def read_at_node(frame: bytes) -> ToNode | Carried:
    """Decodes a frame that the server has sent. Raises ProtocolError for an unknown message."""
    message: ToNode | Carried = _read(frame, _NODE_DECODER)
    return message


def read_at_server(frame: bytes) -> ToServer | Carried:
    """Decodes a frame that a node has sent. Raises ProtocolError for an unknown message."""
    message: ToServer | Carried = _read(frame, _SERVER_DECODER)
    return message


def _read(frame: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    view = memoryview(frame)
    kind = view[0] if len(view) else None
    if kind == CONTROL:
        try:
            return decoder.decode(view[1:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a frame of {len(view)} bytes is not a known message of a link: {error}") from error
    if kind != MESSAGE or len(view) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(view)} bytes has the unknown kind {kind}")
    _, member, length = _HEADER.unpack_from(view)
    end = _HEADER.size + length
    if end > len(view):
        raise ProtocolError(f"a frame of {len(view)} bytes announces a message of {length} bytes")
    return Carried(member, view[_HEADER.size : end], view[end:])
