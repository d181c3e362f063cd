"""Gives the server access to the host blocks of a node's agents. ``cluster/remote_pool.py`` describes the messages.

Each connection has a thread, so no step waits for a block.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from llm_serving.cluster import remote_pool as wire
from llm_serving.cluster.messages import SECRET_BYTES
from llm_serving.config import Config
from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.host_pool import HostPoolMemory
from llm_serving.ipc.introduction import receive, receive_into
from llm_serving.ipc.receiver import Receiver
from llm_serving.kvstore.identity import weights_digest, weights_state


class NodeHostBlocks(Receiver):
    """Serves the host blocks of the present agents to the server, which must know ``secret``.

    Each start of agents has a new secret, so a connection that is meant for earlier agents is refused. Only the newest
    connection may write. So a late write from an older, broken connection changes no block.
    """

    MAGIC = wire.MAGIC
    MAX_CONNECTIONS = 8
    TIMEOUT_S = wire.TIMEOUT_S

    def __init__(self, pools: Sequence[HostPoolMemory], read_weights: Callable[[], str]) -> None:
        """``pools`` has the host blocks of each agent on this node, in order of rank.

        ``read_weights`` returns the digest of the weights. It may take long, and raises OSError or LLMServingError.
        """
        super().__init__(secrets.token_bytes(SECRET_BYTES))
        self._pools = pools
        self._block_bytes = sum(pool.block_bytes for pool in pools)
        self._num_blocks = pools[0].layout.num_blocks
        self._facts = wire.describe_layouts([pool.layout for pool in pools])
        self._read_weights = read_weights
        self._reader: threading.Thread | None = None
        """The thread that computes the digest of the weights. None until the server first asks for the digest."""
        self._weights = wire.PENDING, ""

    @classmethod
    def of(cls, config: Config, pools: Sequence[HostPoolMemory]) -> NodeHostBlocks:
        """Creates the object that serves ``pools``. Call this method before the agents start.

        It records the size and times of each weight file. If a file changes later, its digest cannot be computed.
        ``config`` is the node's config. Digests are cached in the folder of its log. Raises OSError.
        """
        folder, state = Path(config.log_config.path).parent, weights_state(config)
        return cls(pools, partial(weights_digest, config, folder, expected=state))

    def receive(self, link: ssl.SSLSocket) -> None:
        """Serves a connection of the server until it ends. Runs in the connection's thread."""
        self.serve(link)

    def _problem_of(self, facts: bytes) -> str:
        if facts == self._facts:
            return ""
        return f"the server describes its host blocks as {facts.hex()[:200]}, the node as {self._facts.hex()[:200]}"

    def _take(self, link: socket.socket) -> None:
        """Handles the next request. Raises ProtocolError if its kind or one of its host blocks does not exist, or if it
        has too many blocks.
        """
        kind, count = wire.REQUEST.unpack(receive(link, wire.REQUEST.size))
        link.settimeout(self.TIMEOUT_S)
        if kind == wire.WEIGHTS:
            link.sendall(self._weights_reply())
        elif kind == wire.READ:
            self._send(link, self._receive_numbers(link, count))
        elif kind == wire.WRITE:
            self._write(link, self._receive_numbers(link, count))
        else:
            raise ProtocolError(f"the server sent a request of the unknown kind {kind}")
        link.settimeout(None)

    def _receive_numbers(self, link: socket.socket, count: int) -> Sequence[int]:
        """Receives the numbers of the blocks of a request."""
        limit = wire.max_blocks(self._block_bytes)
        if not 1 <= count <= limit:
            raise ProtocolError(f"a request has {count} blocks; it must have 1 to {limit}")
        blocks = struct.unpack(f"<{count}I", receive(link, count * wire.BLOCK.size))
        if max(blocks) >= self._num_blocks:
            raise ProtocolError(f"a request names host block {max(blocks)} of {self._num_blocks}")
        return blocks

    def _send(self, link: socket.socket, blocks: Sequence[int]) -> None:
        """Sends the number and the content of each block. All blocks use one buffer, because a new one costs time."""
        reply = memoryview(bytearray(wire.BLOCK.size + self._block_bytes))
        for block in blocks:
            wire.BLOCK.pack_into(reply, 0, block)
            for pool, part in self._parts(reply[wire.BLOCK.size :]):
                pool.copy_out(block, part)
            link.sendall(reply)

    def _write(self, link: socket.socket, blocks: Sequence[int]) -> None:
        """Receives and writes the content of each block, and replies for each block."""
        content = memoryview(bytearray(self._block_bytes))
        for block in blocks:
            receive_into(link, content)
            with self._changed:
                if self._newest is not link:
                    raise ProtocolError("the server writes through an old connection")
                for pool, part in self._parts(content):
                    pool.copy_in(block, part)
            link.sendall(wire.BLOCK.pack(block))

    def _parts(self, content: memoryview) -> Iterator[tuple[HostPoolMemory, memoryview]]:
        """Yields the host blocks of each agent, with the agent's part of ``content``."""
        end = 0
        for pool in self._pools:
            begin, end = end, end + pool.block_bytes
            yield pool, content[begin:end]

    def _weights_reply(self) -> bytes:
        with self._changed:
            if self._reader is None:
                reader = threading.Thread(target=self._note_weights, name="weights", daemon=True)
                try:
                    reader.start()
                except RuntimeError as error:  # the system has too many threads now; the server asks again
                    raise ProtocolError(f"the thread that reads the weights cannot start: {error}") from error
                self._reader = reader
            state, text = self._weights
        return wire.WEIGHTS_REPLY.pack(state, text.encode()[: wire.MAX_TEXT_BYTES])

    def _note_weights(self) -> None:
        try:
            weights = wire.KNOWN, self._read_weights()
        except (OSError, LLMServingError) as error:
            weights = wire.FAILED, str(error)
        except Exception as error:  # without a result, the server would ask forever
            weights = wire.FAILED, f"they could not be read: {error!r}"
        with self._changed:
            self._weights = weights
