"""The hand-over pools of a node's agents, and the transfers of their blocks to other nodes and from other nodes.

Only replicas with the role ``prefill`` or ``decode`` have these pools. Nodes send blocks to each other through
connections of their own. These connections go to the same port as the link from the server. Each connection has a
thread, so no step waits for a transfer.
"""

from __future__ import annotations

import os
import secrets
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from llm_serving.cluster.dialling import connect_for_blocks
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.messages import SECRET_BYTES, BlocksSent, SendBlocks
from llm_serving.config import Config
from llm_serving.config.parallel_section import MOONCAKE
from llm_serving.errors import ConfigError, LLMServingError, ProtocolError
from llm_serving.handover.transport import FRAMES, Carrier, OnCancel, PoolReceiver, TcpTransport, TransferError
from llm_serving.ipc.hand_over_memory import HandOverLayout, HandOverMemory

MAX_ERROR_CHARACTERS = 1000
"""Maximum length of the error that a node reports about a transfer."""

NewCarrier = Callable[[Sequence[HandOverMemory]], Carrier]
"""Type of a function that makes the carrier, which moves blocks between hand-over pools of two nodes.

It is called before ``unlink``, so another process can still map the pools by name. Raises TransferError or OSError.
"""


class HandedBlocks:
    """The hand-over pools of a node's present agents: one pool for each agent, in order of rank.

    ``descriptor`` becomes readable when a transfer has ended. ``take_sent`` then returns the transfer. Nodes that send
    blocks here must know ``secret``. Each start of agents has a new secret, so blocks for earlier agents are refused.
    """

    def __init__(
        self, layouts: Sequence[HandOverLayout], key: ClusterKey, new_carrier: NewCarrier = lambda memories: FRAMES
    ) -> None:
        """Creates the pools. Raises OSError if /dev/shm is too small, and TransferError if the carrier cannot work."""
        self._key = key
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._memories: list[HandOverMemory] = []
        self._transports: dict[tuple[str, int], tuple[bytes, TcpTransport]] = {}
        """The secret and the transport of each node to which blocks were sent, by host and port."""
        self._sent: deque[BlocksSent] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            for layout in layouts:
                self._memories.append(HandOverMemory.create(layout))
            self._carrier = new_carrier(self._memories)
        except BaseException:
            self.unlink()
            os.close(self.descriptor)
            raise
        self._receiver = PoolReceiver(self._memories, self.secret, self._carrier)

    @classmethod
    def of(cls, config: Config, key: ClusterKey, ranks: range, host: str, on_cancel: OnCancel) -> HandedBlocks | None:
        """Creates the pools of a node. ``ranks`` are the ranks of its agents in their replica. Returns None unless
        ``config`` has the roles ``prefill`` and ``decode``.

        ``host`` is the address at which other nodes reach this one. The start of the transport may take long.
        ``on_cancel`` is called with a function that stops this start. Raises OSError, and ConfigError if this machine
        cannot use the transport of the config.
        """
        layouts = [HandOverLayout.of(config, rank) for rank in ranks]
        known = [layout for layout in layouts if layout is not None]
        try:
            return cls(known, key, partial(_carrier_of, config, host, on_cancel)) if known else None
        except TransferError as error:
            transport = config.parallel_config.hand_over_transport
            problem = f"parallel_config.hand_over_transport: {transport} does not work on this node: {error}"
            raise ConfigError(problem) from error

    @property
    def names(self) -> list[str]:
        """The names of the segments, which the agents map."""
        return [memory.name for memory in self._memories]

    def unlink(self) -> None:
        """Removes the names of the segments. Call this method when the agents have mapped them."""
        for memory in self._memories:
            memory.unlink()

    def receive(self, link: ssl.SSLSocket) -> None:
        """Receives blocks through a connection until it ends. Runs in the connection's thread."""
        self._receiver.serve(link)

    def send(self, message: SendBlocks) -> None:
        """Begins to send blocks to another node. ``take_sent`` reports when the transfer has ended.

        Raises ProtocolError if a block does not exist.
        """
        try:
            self._transport(message).transfer(message.pairs, partial(self._note_sent, message.number))
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    def take_sent(self) -> list[BlocksSent]:
        """Returns the transfers that have ended since the last call."""
        os.eventfd_read(self.descriptor)
        sent = []
        while self._sent:
            sent.append(self._sent.popleft())
        return sent

    def close(self) -> None:
        """Ends all transfers. Waits until no thread writes to the pools, and removes them."""
        for _, transport in self._transports.values():
            transport.close()
        self._carrier.close()
        self._receiver.close()
        self.unlink()
        with self._lock:
            self._is_closed = True
            os.close(self.descriptor)

    def _note_sent(self, number: int, error: LLMServingError | None) -> None:
        """Records the end of a transfer, unless ``close`` was called. The thread of a transport calls this method."""
        text = "" if error is None else str(error)[:MAX_ERROR_CHARACTERS]
        with self._lock:
            if not self._is_closed:
                self._sent.append(BlocksSent(number, text))
                os.eventfd_write(self.descriptor, 1)

    def _transport(self, message: SendBlocks) -> TcpTransport:
        """Returns the connection (transport) to the node that ``message`` names, and makes a new one if necessary.

        A new secret means that the node has new agents. The old connection is then closed, because an idle connection
        does not notice the end of its peer. Before a new connection is made, all idle ones are closed, so that they do
        not accumulate.
        """
        place = (message.host, message.port)
        secret, transport = self._transports.get(place, (b"", None))
        if transport is not None and secret == message.secret and not transport.is_closed:
            return transport
        if transport is not None:
            transport.stop()
        self._transports = {key: pair for key, pair in self._transports.items() if not pair[1].is_idle}
        connect = partial(connect_for_blocks, place, self._key.blocks)
        transport = TcpTransport(self._memories, connect, message.secret, self._carrier)
        self._transports[place] = (message.secret, transport)
        return transport


def _carrier_of(config: Config, host: str, on_cancel: OnCancel, memories: Sequence[HandOverMemory]) -> Carrier:
    parallel = config.parallel_config
    if parallel.hand_over_transport != MOONCAKE:
        return FRAMES
    from llm_serving.handover.mooncake.reader import MooncakeReader
    from llm_serving.handover.one_sided import OneSidedCarrier

    device = parallel.mooncake_device or ""
    return OneSidedCarrier(MooncakeReader(memories, parallel.mooncake_protocol, device, host, on_cancel))
