"""Simulates separate prefill and decode: the roles of the replicas, and the nodes that hold the handed blocks.

The real router and schedulers decide on hand-overs. A simulation adds the time of the copies, the transmission of
blocks between nodes, and the blocks that are lost with a node.
"""

from __future__ import annotations

from dataclasses import replace

from llm_serving.config import Config
from llm_serving.engine.roles import prefill_split
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import MoveKind, ScheduledStep
from performance.program import UsageError

__all__ = ["HandedBlocks", "simulated_split"]


def simulated_split(config: Config, limits: SchedulerLimits, num_replicas: int) -> PrefillSplit | None:
    """Returns the roles of ``num_replicas`` replicas. None if every replica does both prefill and decode.

    If there are more replicas than roles in the config, the list of roles is repeated. The hand-over pool grows by the
    same factor. Raises UsageError if ``num_replicas`` is not a multiple of the number of roles.
    """
    parallel = config.parallel_config
    if not parallel.has_roles:
        return None
    roles = parallel.replica_roles
    repeats, rest = divmod(num_replicas, len(roles))
    if rest:
        raise UsageError(
            f"--replicas {num_replicas}: parallel_config.roles has {len(roles)} roles, which repeat; "
            f"use a multiple of {len(roles)}"
        )
    parallel = replace(
        parallel,
        roles=roles * repeats,
        data_parallel=num_replicas,
        hand_over_blocks=config.num_hand_over_blocks * repeats,
    )
    return prefill_split(replace(config, parallel_config=parallel), limits)


class HandedBlocks:
    """Knows on which node each block of the hand-over pool is, and whether its content still exists.

    A handed block is in the memory of the node that computed it. A node that stops loses its blocks.
    """

    def __init__(self, block_bytes: float) -> None:
        self._block_bytes = block_bytes
        self._nodes: dict[int, int] = {}
        """For each block of the pool that has content: the node that computed the block."""
        self.sent_bytes = 0.0
        """Bytes of blocks that went from one node to another."""

    def sent(self, step: ScheduledStep, node: int) -> dict[int, float]:
        """Records which handed blocks a step moves. ``node`` runs the step.

        Returns, for each other node that must send blocks to ``node`` for this step, the number of bytes.
        """
        sources: dict[int, float] = {}
        for move in step.moves:
            if move.kind is MoveKind.HAND_OUT:
                self._nodes[move.destination] = node
            elif move.kind is MoveKind.HAND_IN:
                source = self._nodes.get(move.source, node)
                if source != node:
                    sources[source] = sources.get(source, 0.0) + self._block_bytes
        self.sent_bytes += sum(sources.values())
        return sources

    def missing(self, step: ScheduledStep) -> list[int]:
        """Returns the indices of the moves of a step whose block was lost with its node."""
        return [
            index
            for index, move in enumerate(step.moves)
            if move.kind is MoveKind.HAND_IN and move.source not in self._nodes
        ]

    def lose(self, node: int) -> None:
        """Forgets all blocks on a node that has stopped."""
        self._nodes = {block: each for block, each in self._nodes.items() if each != node}
