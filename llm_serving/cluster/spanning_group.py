"""Runs the agents of one replica on several nodes, for models that do not fit one node.

Each node has a part of the agents. Each part is a ``RemoteGroup`` with a link of its own. All parts get the same
messages, and their nodes exchange data directly (``llm_serving/agent_host/exchange_bridge.py``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from llm_serving.cluster.messages import NODE_PATIENCE_S, SECRET_BYTES, Place, Share
from llm_serving.cluster.nodes import Node
from llm_serving.cluster.remote_group import RemoteGroup, RemoteMember, RemotePart, new_slots
from llm_serving.config import Config
from llm_serving.errors import AgentError, AgentLostError, LLMServingError
from llm_serving.executor.group import Received, Source
from llm_serving.handover.transport import Done, Pairs
from llm_serving.ipc import messages
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.host_pool import HostPool
from llm_serving.ipc.messages import ServerMessage

_LONGEST_LOOK_S = 1.0
"""Maximum seconds between two calls of ``SpanningGroup.look`` that count as time in which the agents were quiet.
Usually at most 0.5 s pass.
"""


class SpanningGroup:
    """A ``Group`` of agents on several nodes. If one node is lost, all agents of the group are ended."""

    def __init__(self, config: Config, nodes: Sequence[Node], make_part: Callable[[Node, RemotePart], RemoteGroup]):
        """``make_part`` is called for each node. It returns the group's part on this node, which then owns the link."""
        self.started_at = time.monotonic()
        self.slots = new_slots(config)
        places = [Place(node.address.host, node.address.port) for node in nodes]
        secret, count = secrets.token_bytes(SECRET_BYTES), config.parallel_config.agents_per_machine
        self._shares = [Share(number, places, secret) for number in range(len(nodes))]
        self._parts = [
            make_part(node, RemotePart(range(number * count, (number + 1) * count), self.slots))
            for number, node in enumerate(nodes)
        ]
        self._lost: RemoteGroup | None = None
        """The part that was lost first."""
        self._quiet_s = 0.0
        """Seconds for which all agents with a step have been quiet, as seen by ``look``."""
        self._looked_at = self.started_at
        self._parts[0].on_cluster = self._start_others
        self._parts[0].start(self._shares[0])

    @property
    def members(self) -> Sequence[RemoteMember]:
        return [member for part in self._parts for member in part.members]

    @property
    def pools(self) -> Sequence[HostPool]:
        return [pool for part in self._parts for pool in part.pools]

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self._parts)

    @property
    def is_leaving(self) -> bool:
        return any(part.is_leaving for part in self._parts)

    @property
    def summary(self) -> dict[str, object]:
        """Values for the log: the summary of the agent that samples, the number of agents, and the names of the nodes.
        """
        answering = next(part for part in self._parts if part.answers)
        nodes = ", ".join(part.node_name for part in self._parts)
        return {**answering.summary, "agents": len(self.members), "node": nodes}

    def sources(self) -> list[Source]:
        sources = [(part, *source) for part in self._parts for source in part.sources()]
        return [(source, partial(self._receive, part, receive)) for part, source, receive in sources]

    def note_progress(self) -> None:
        """Does nothing, because the nodes themselves report progress and readiness."""

    def send(self, message: ServerMessage) -> None:
        for part in self._parts:
            part.send(message)

    def load_adapter(self, message: messages.AdapterLoad, memory: AdapterMemory) -> None:
        for part in self._parts:
            part.load_adapter(message, memory)

    def send_blocks(self, target: SpanningGroup, pairs: Pairs, done: Done) -> None:
        """Lets each node send its part of the blocks to the node of ``target`` whose agents have the same ranks in
        their replica.

        ``pairs`` lists the blocks. ``done`` is called once at the end of all transfers, by the engine thread. It gets
        the first error, or None.
        """
        ends: list[LLMServingError | None] = []

        def note(error: LLMServingError | None) -> None:
            ends.append(error)
            if len(ends) == len(self._parts):
                done(next(filter(None, ends), None))

        for source, other in zip(self._parts, target._parts, strict=True):
            source.send_blocks(other, pairs, note)

    def next_look(self, last_result: float | None) -> float | None:
        return min(due for part in self._parts if (due := part.next_look(last_result)) is not None)

    def look(self, now: float, last_result: float, slots: Iterable[int]) -> None:
        """Sends a sign of life to each node if one is due. Raises AgentError if a node is lost or has been drained.

        Also raises AgentLostError if all agents that have a step only wait for each other for ``NODE_PATIENCE_S``. A
        shorter wait is no sign of a fault, because the input of an agent may still be on the way.
        """
        for part in self._parts:
            self._call(part, partial(part.look, now, last_result, slots))
        waiting = [part for part in self._parts if part.has_steps]
        # While this process was paused, messages of the nodes may have waited unread. So at most ``_LONGEST_LOOK_S`` of
        # a pause count as quiet time.
        passed_s = min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        self._quiet_s = self._quiet_s + passed_s if waiting and all(part.is_quiet for part in waiting) else 0.0
        if self._quiet_s >= NODE_PATIENCE_S:
            nodes = ", ".join(part.node_name for part in waiting)
            raise AgentLostError(f"all agents on {nodes} have done nothing for too long in the middle of a step")

    def describe_loss(self, noticed: AgentError) -> AgentError:
        return noticed if self._lost is None else self._lost.describe_loss(noticed)

    def kill(self) -> None:
        for part in self._parts:
            part.kill()

    def close(self) -> None:
        self.kill()

    def shutdown(self, seq: int) -> None:
        """Asks all nodes to end their agents, and closes the links without waiting."""
        for part in self._parts:
            part.shutdown(seq)

    def _start_others(self, cluster: Place | None) -> None:
        """Starts the agents of all nodes except the first one, which has replied with ``cluster``.

        ``cluster`` is the address at which the agents find each other, or None if the agents need no address.
        """
        for part, share in list(zip(self._parts, self._shares, strict=True))[1:]:
            part.start(msgspec.structs.replace(share, cluster=cluster))

    def _receive(self, part: RemoteGroup, receive: Callable[[], Received]) -> Received:
        received: Received = []
        self._call(part, lambda: received.extend(receive()))
        return [(part.first_member + member, message) for member, message in received]

    def _call(self, part: RemoteGroup, action: Callable[[], None]) -> None:
        """Calls ``action``, and remembers the first part whose node is lost."""
        try:
            action()
        except AgentError:
            self._lost = self._lost or part
            raise
