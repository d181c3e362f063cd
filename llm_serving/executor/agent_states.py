"""What is known of a replica's agents, for people: in the status pages, and when they are asked how they are."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from llm_serving.config import Config
from llm_serving.executor.agent_link import AgentLink
from llm_serving.executor.base import AgentStatus
from llm_serving.executor.restarts import Restarts
from llm_serving.ipc.messages import StatusReply
from llm_serving.model.parallel import group_ranks, place


class AgentStates:
    """``listeners``: the listening socket of each agent, in order of rank. The group's ``links`` are there while it
    runs. Any thread may ``describe``."""

    def __init__(self, config: Config, replica: int, listeners: Sequence[socket.socket], restarts: Restarts) -> None:
        self.is_wanted = False
        """The agents are asked how they are, or will be when they are ready."""
        self._config = config
        self._replica = replica
        self._listeners = listeners
        self._restarts = restarts
        self._replies: dict[int, StatusReply] = {}

    def ask(self) -> None:
        """All of them are asked, again if they were before."""
        self.is_wanted = True
        self._replies.clear()

    def lose(self) -> None:
        """The agents are gone, with their replies."""
        self._replies.clear()

    def add(self, member: int, reply: StatusReply, links: Sequence[AgentLink]) -> AgentStatus | None:
        """Take an agent's reply (``member``: from 0). How all are, once every agent's is there."""
        self._replies[member] = reply
        if len(self._replies) < len(self._listeners):
            return None
        self.is_wanted = False
        agents = self.describe(links)
        for index, agent in enumerate(agents):
            said = self._replies[index]
            agent.update(steps=said.steps, queued=said.queued, rss_bytes=said.rss_bytes)
        self._replies.clear()
        return AgentStatus(agents)

    def describe(self, links: Sequence[AgentLink]) -> list[dict[str, object]]:
        """See ``Executor.agents``."""
        by_rank = {link.rank: link for link in links}
        ranks = group_ranks(self._replica, self._config.parallel_config)
        return [
            self._describe(rank, listener, by_rank.get(rank))
            for rank, listener in zip(ranks, self._listeners, strict=True)
        ]

    def _describe(self, rank: int, listener: socket.socket, link: AgentLink | None) -> dict[str, object]:
        where = place(rank, self._config.parallel_config)
        state = "ready" if link and link.is_ready else "starting" if link else self._state_without_link()
        return {
            "rank": rank,
            "replica": self._replica,
            "tensor_parallel_index": where.tp_index,
            "pipeline_stage": where.pp_index,
            "state": state,
            "pid": link.process.pid if link else None,
            "address": "{}:{}".format(*listener.getsockname()[:2]),
            "restarts": self._restarts.count,
            **({"summary": link.summary} if link and link.is_ready else {}),
        }

    def _state_without_link(self) -> str:
        if self._restarts.is_given_up:
            return "stopped"
        return "starting" if self._restarts.due_at is None else "restarting"
