"""Starts the agents of a replica on free nodes."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.cluster.nodes import Node, NodePool
from llm_serving.cluster.remote_group import RemoteGroup
from llm_serving.cluster.spanning_group import SpanningGroup
from llm_serving.cluster.standby import Standby, is_wanted
from llm_serving.config import Config
from llm_serving.errors import AgentStartError, LLMServingError, MemoryPlanError
from llm_serving.executor.agent_link import ProgressReport
from llm_serving.ipc.tile_memory import TileMemory
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import plan_node


class RemoteStarter:
    """Starts the agents of a replica on a free node, or on several nodes. Its ``__call__`` is a ``StartGroup``."""

    def __init__(
        self,
        config: Config,
        replica: int,
        pool: NodePool,
        model: Callable[[], dict[str, str]],
        report: ProgressReport,
        standby: Standby | None = None,
        tiles: TileMemory | None = None,
        prompt_pool: str = "",
    ) -> None:
        """``standby`` decides when nodes may be used. None means always. ``model`` returns the description of the
        model's files. ``tiles`` is the server's memory with the tiles of images, or None if the model reads no images.
        ``prompt_pool`` is the replica's pool by prompt length, or empty if the config has no pools.
        """
        self._config = config
        self._replica = replica
        self.pool = pool
        self.standby = standby
        self._model = model
        self._report = report
        self._tiles = tiles
        self._prompt_pool = prompt_pool

    def __call__(self) -> RemoteGroup | SpanningGroup | None:
        """Starts the agents on ``nodes_per_replica`` free nodes. Returns None if too few nodes are free, or if the
        standby wants no nodes now.

        If nodes name the pool of the replica, uses only these nodes, and only while this pool needs them. Otherwise,
        uses only nodes that name no pool, while any pool needs them.

        Raises AgentStartError if the model's files cannot be read, or the agents could not be started.
        """
        pool = self._prompt_pool if self._prompt_pool and self.pool.has_nodes_of(self._prompt_pool) else ""
        standby = None if self.standby is None else self.standby.of_pool(pool)
        if not is_wanted(standby):
            return None
        model = self._model()
        nodes = self._take_nodes(pool)
        if not nodes:
            return None
        try:
            return self._start(nodes, model, standby)
        except (OSError, LLMServingError) as error:
            names = ", ".join(node.name for node in nodes)
            for node in nodes:
                self._give_back(node, f"the agents could not be started there: {error}")
            text = f"node{'s' if len(nodes) > 1 else ''} {names}: the agents could not be started there: {error}"
            raise AgentStartError(text) from error

    def _start(
        self, nodes: list[Node], model: dict[str, str], standby: Standby | None
    ) -> RemoteGroup | SpanningGroup:
        parts = (self.pool, model, self._report, standby, self._tiles)
        if len(nodes) == 1:
            return RemoteGroup(self._config, self._replica, nodes[0], *parts)
        return SpanningGroup(
            self._config, nodes, lambda node, part: RemoteGroup(self._config, self._replica, node, *parts, part)
        )

    def _take_nodes(self, prompt_pool: str) -> list[Node]:
        """Takes free nodes of a pool by prompt length that have enough memory for the agents. Marks nodes with too
        little memory as refused. Returns an empty list if too few nodes are left.
        """
        while nodes := self.pool.take(self._replica, self._config.parallel_config.nodes_per_replica, prompt_pool):
            problems = [self._problem_of(node) for node in nodes]
            if not any(problems):
                return nodes
            for node, problem in zip(nodes, problems, strict=True):
                self._give_back(node, problem, is_refused=bool(problem))
        return []

    def _problem_of(self, node: Node) -> str:
        """Compares the memory plan with the memory that a node reports. Returns the problem, or an empty text."""
        assert node.welcome is not None, "a node that is taken has a link"
        report = node.welcome
        try:
            plan_node(self._config, Machine(report.memory_bytes, f"{report.memory_from} of the node", report.cores))
        except MemoryPlanError as error:
            return f"the model does not fit the node: {error}"
        return ""

    def _give_back(self, node: Node, problem: str, *, is_refused: bool = False) -> None:
        """Returns a node without agents to the pool, which connects to the node again."""
        if node.channel is not None:
            node.channel.close()
        self.pool.give_back(node, problem, is_refused=is_refused)
