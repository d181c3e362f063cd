"""Sends LoRA adapters to a node, which loads them into its agents.

The node asks for the bytes of an adapter, unless its cache has them. It asks for one piece after the other. So a step
that is sent meanwhile waits for at most one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_serving.cluster import messages as link
from llm_serving.errors import ProtocolError
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.messages import AdapterLoad, AdapterLoaded


@dataclass(slots=True)
class _Loading:
    memory: AdapterMemory
    num_missing: int
    """Number of agents that have not replied."""


class AdapterSender:
    """Sends adapters to a node, and records which adapters the node is loading. ``send`` sends a frame to the node."""

    def __init__(self, num_agents: int, send: Callable[[bytes], None]) -> None:
        self._num_agents = num_agents
        self._send = send
        self._loading: dict[int, _Loading] = {}
        """The adapters that at least one agent still has to load, by the number of the message that loads them."""

    def load(self, message: AdapterLoad, memory: AdapterMemory) -> None:
        """Asks the node to load an adapter into a slot of its agents. ``memory`` contains the adapter."""
        self._loading[message.seq] = _Loading(memory, self._num_agents)
        parts = (message.seq, message.adapter_slot, memory.digest(), memory.num_bytes)
        self._send(link.control(link.LoadAdapter(*parts)))

    def send_piece(self, wanted: link.WantAdapter) -> None:
        """Sends the bytes that the node asks for. Raises ProtocolError if they are not bytes of an adapter that the
        node loads.
        """
        loading = self._loading.get(wanted.seq)
        if loading is None or wanted.begin + wanted.num_bytes > loading.memory.num_bytes:
            raise ProtocolError(
                f"the node asks for {wanted.num_bytes} bytes from {wanted.begin} of adapter message {wanted.seq}, "
                + ("which it does not load" if loading is None else f"which has {loading.memory.num_bytes} bytes")
            )
        end = wanted.begin + wanted.num_bytes
        for begin in range(wanted.begin, end, link.PART_BYTES):
            data = loading.memory.read(begin, min(link.PART_BYTES, end - begin))
            self._send(link.control(link.AdapterPart(wanted.seq, begin, data)))

    def take(self, reply: AdapterLoaded) -> None:
        """Processes the reply of one agent. Raises ProtocolError if the agent has no adapter to load."""
        loading = self._loading.get(reply.seq)
        if loading is None:
            raise ProtocolError(f"an agent has loaded adapter message {reply.seq}, which the server did not send")
        loading.num_missing -= 1
        if not loading.num_missing:
            del self._loading[reply.seq]  # releases the memory of an adapter that was unloaded meanwhile
