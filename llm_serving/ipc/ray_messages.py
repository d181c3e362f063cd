"""The messages between a server and its Ray driver, the only process of a server that uses Ray.

They are MessagePack in frames on a connected socket, which the driver inherits.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from llm_serving.errors import ProtocolError
from llm_serving.ipc.messages import LongText, ShortText, UInt


class RayMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """The base class of the messages between a server and its Ray driver."""


class Placement(RayMessage, frozen=True, tag="placement"):
    """Server to driver, the first message: the nodes that Ray must place."""

    address: ShortText
    """Address of the Ray cluster, or ``auto``."""
    num_nodes: Annotated[int, msgspec.Meta(ge=1, le=256)]
    resources: dict[str, float]
    """Resources that a node reserves on its machine, for example ``{"CPU": 8}``."""
    key_file: LongText
    log_folder: LongText
    agent_module: ShortText = "agent"


class NodeLost(RayMessage, frozen=True, tag="node_lost"):
    """Server to driver: the link to a node is lost. The driver ends the node and places another one."""

    name: ShortText


class NodePlaced(RayMessage, frozen=True, tag="node_placed"):
    """Driver to server: a node runs and accepts links."""

    name: ShortText
    address: ShortText


class NodeEnded(RayMessage, frozen=True, tag="node_ended"):
    """Driver to server: a node has ended, or Ray has lost its machine."""

    name: ShortText
    reason: LongText


class Waiting(RayMessage, frozen=True, tag="waiting"):
    """Driver to server: ``num_nodes`` nodes wait until the cluster has free resources."""

    num_nodes: UInt
    reason: LongText = ""


ToDriver = Placement | NodeLost
ToServer = NodePlaced | NodeEnded | Waiting

_ENCODER = msgspec.msgpack.Encoder()
_DRIVER_DECODER = msgspec.msgpack.Decoder(ToDriver)
_SERVER_DECODER = msgspec.msgpack.Decoder(ToServer)


def encode(message: RayMessage) -> bytes:
    """Returns the bytes of a message."""
    return _ENCODER.encode(message)


def read_at_driver(payload: bytes) -> ToDriver:
    """Returns a message of the server. Raises ProtocolError for an unknown message."""
    try:
        message: ToDriver = _DRIVER_DECODER.decode(payload)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the server sent an unknown message to the Ray driver: {error}") from error


def read_at_server(payload: bytes) -> ToServer:
    """Returns a message of the driver. Raises ProtocolError for an unknown message."""
    try:
        message: ToServer = _SERVER_DECODER.decode(payload)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the Ray driver sent an unknown message: {error}") from error
