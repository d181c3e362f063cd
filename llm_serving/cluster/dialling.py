"""Connects the server to a node: TCP, TLS, and the handshake of the link."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Collection
from typing import NamedTuple

from llm_serving.cluster import messages
from llm_serving.cluster.channel import SecureChannel
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.messages import HANDSHAKE_TIMEOUT_S, Hello, Refused, Welcome
from llm_serving.cluster.program import difference, own_program
from llm_serving.errors import ConfigError, LLMServingError, ProtocolError

CONNECT_TIMEOUT_S = 3.0
"""Maximum seconds to connect to a node."""


class NodeRefusedError(LLMServingError):
    """A node refuses this server, runs another program, or names an unknown pool. The error's text has the reason."""


class NodeBusyError(LLMServingError):
    """A node serves another link."""


class Address(NamedTuple):
    """Host name or IP address of a node, and its port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str) -> Address:
    """Parses ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ConfigError if the text is no address."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_valid = bare and port.isascii() and port.isdecimal() and 0 < int(port) < 65536 and len(bare) <= 255
    if not is_valid or (":" in bare) != (bare is not host) or not bare.isprintable() or " " in bare:
        raise ConfigError(f"{text!r} is not the address of a node; write HOST:PORT or [IPV6]:PORT")
    return Address(bare, int(port))


def read_listen_address(text: str) -> Address:
    """Parses the address ``IP:PORT`` on which a node listens. Port 0 stands for any free port. Raises ConfigError."""
    if text.endswith(":0"):
        return read_address(f"{text[:-1]}1")._replace(port=0)
    return read_address(text)


def connect_for_blocks(address: tuple[str, int], context: ssl.SSLContext) -> ssl.SSLSocket:
    """Opens a connection to a node for KV blocks. The connection is not a link. Waits at most a few seconds.

    ``context`` has the TLS settings, with the protocol name (ALPN) for this kind of data. Raises OSError.
    """
    plain = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    try:
        return context.wrap_socket(plain)
    except BaseException:
        plain.close()
        raise


def dial(address: Address, key: ClusterKey, pools: Collection[str] = ()) -> tuple[SecureChannel, Welcome]:
    """Connects to a node. Returns the link and the node's first message. The node must be free and run the same program
    as this server. If it names a pool by prompt length, ``pools`` must contain the pool. Waits at most a few seconds.

    Raises OSError if the node cannot be reached or has another cluster key, and NodeBusyError if the node serves
    another link. Raises NodeRefusedError if the programs differ or the pool is unknown, and ProtocolError for a wrong
    message.
    """
    plain = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
    try:
        secure = key.client.wrap_socket(plain)
    except ssl.SSLError as error:
        plain.close()
        raise ConnectionError(f"no TLS with this cluster key: {error.reason or error}") from None
    except OSError:
        plain.close()
        raise
    channel = SecureChannel(secure)
    try:
        channel.send(messages.control(Hello(own_program())))
        answer = messages.read_at_server(channel.receive_one(HANDSHAKE_TIMEOUT_S))
        if isinstance(answer, Refused):
            raise NodeBusyError(answer.reason) if answer.is_busy else NodeRefusedError(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the node at {address} sent {type(answer).__name__} instead of a welcome")
        if (other := difference(own_program(), answer.program)) is not None:
            raise NodeRefusedError(other)
        if answer.pool and answer.pool not in pools:
            known = f"the pools are {', '.join(pools)}" if pools else "the server has no pools (parallel_config.pools)"
            raise NodeRefusedError(f"the node serves the pool {answer.pool!r}, which is unknown; {known}")
    except ssl.SSLError as error:
        channel.close()
        raise ConnectionError(f"the node refused this cluster key: {error.reason or error}") from None
    except BaseException:
        channel.close()
        raise
    return channel, answer
