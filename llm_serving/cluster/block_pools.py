"""The hand-over pools of replicas on nodes. Nodes send blocks directly to each other, not through the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llm_serving.cluster.remote_group import RemoteGroup
from llm_serving.cluster.spanning_group import SpanningGroup
from llm_serving.handover.transport import BlockTransport, Done, Pairs, TransferError

if TYPE_CHECKING:
    from llm_serving.executor.agent_executor import AgentExecutor


class NodePools:
    """The hand-over pools of replicas on nodes. The pool of a replica exists as long as the agents of the replica run.
    """

    is_shared = False

    def __init__(self, executors: Sequence[AgentExecutor]) -> None:
        self._executors = executors

    def transport(self, source: int, target: int) -> BlockTransport:
        return NodeTransport(self._executors[source], self._executors[target])


class NodeTransport:
    """Asks the node of one replica to send blocks to the node of another one. Only the engine thread may use it."""

    def __init__(self, source: AgentExecutor, target: AgentExecutor) -> None:
        self._source, self._target = source, target

    def transfer(self, pairs: Pairs, done: Done) -> None:
        """Starts a copy of blocks from the source's pool to the target's pool. Returns immediately.

        The engine thread calls ``done`` at the end, with an error if not all blocks have arrived.
        """
        match self._source.group, self._target.group:
            case RemoteGroup() as source, RemoteGroup() as target:
                source.send_blocks(target, pairs, done)
            case SpanningGroup() as spanning, SpanningGroup() as other:
                spanning.send_blocks(other, pairs, done)
            case _:
                done(TransferError("the agents of a replica were lost before its blocks were sent"))

    def close(self) -> None:
        """Does nothing. The transfers end with the links of the nodes."""
