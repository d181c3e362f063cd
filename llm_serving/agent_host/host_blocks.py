"""Gives the server access to the host blocks of a node's agents. ``cluster/remote_pool.py`` describes the messages.

Each connection has a thread, so no step waits for a block.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from llm_serving.cluster import remote_pool as wire
from llm_serving.cluster.messages import SECRET_BYTES
from llm_serving.config import Config
from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.host_pool import HostPoolMemory, pool_of
from llm_serving.ipc.introduction import receive
from llm_serving.ipc.receiver import Receiver
from llm_serving.kvstore.identity import weights_digest, weights_state


class NodeHostBlocks(Receiver):
    """Serves the host blocks of one run of the agents to the server, which must know ``secret``.

    Each run has a new secret, so a connection to an earlier run is refused. Only the newest connection may write. So a
    write of a broken connection, which arrives late, changes no block.
    """

    MAGIC = wire.MAGIC
    MAX_CONNECTIONS = 8
    TIMEOUT_S = wire.TIMEOUT_S

    def __init__(self, pools: Sequence[HostPoolMemory], read_weights: Callable[[], str]) -> None:
        """``pools`` has the host blocks of each agent on this node, in order of rank.

        ``read_weights`` returns the digest of the weights. It may take long, and raises OSError or LLMServingError.
        """
        super().__init__(secrets.token_bytes(SECRET_BYTES))
        self._pool = pool_of(pools)
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
        """Handles the next request. Raises ProtocolError if its kind or its host block does not exist."""
        kind, block = wire.REQUEST.unpack(receive(link, wire.REQUEST.size))
        link.settimeout(self.TIMEOUT_S)
        if kind == wire.WEIGHTS:
            link.sendall(self._weights_reply())
        elif kind not in (wire.READ, wire.WRITE) or block >= self._num_blocks:
            raise ProtocolError(f"the server sent request {kind} for host block {block} of {self._num_blocks}")
        elif kind == wire.READ:
            content = self._pool.read(block)
            assert content is not None, "the blocks are in the memory of this machine"
            link.sendall(content)
        else:
            content = receive(link, self._pool.block_bytes)
            with self._changed:
                if self._newest is not link:
                    raise ProtocolError("the server writes through an old connection")
                self._pool.write(block, content)
            link.sendall(wire.WRITTEN.pack(block))
        link.settimeout(None)

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
