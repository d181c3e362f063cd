"""Describes a replica's agents for status pages, and decides when lost agents are restarted."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.config import Config
from llm_serving.executor.base import AgentStatus
from llm_serving.executor.group import Member
from llm_serving.ipc.messages import StatusReply
from llm_serving.model.parallel import group_ranks, place

FIRST_BACKOFF_S = 0.25
"""Seconds before lost agents are restarted for the first time. The time doubles with each restart."""
LONGEST_BACKOFF_S = 60.0
"""Maximum seconds before lost agents are restarted."""
STABLE_AFTER_S = 60.0
"""If agents were ready for this number of seconds before their loss, the count of consecutive restarts begins at 0
again.
"""


def backoff_after(restarts: int) -> float:
    """Returns the seconds to wait before the next start, after ``restarts`` consecutive restarts."""
    return min(FIRST_BACKOFF_S * 2.0 ** min(restarts, 16), LONGEST_BACKOFF_S)


class Restarts:
    """Decides after each loss of a group whether and when it is restarted. ``limit`` is the maximum number of restarts
    in a row, or None.

    Without a limit, a group that has been ready is restarted until the server ends. A group that has never been ready
    is not restarted: the server stops, so that its supervisor can restart it. With ``from_the_start``, a group that has
    never been ready is restarted, too, because another machine may be able to start it. All times are seconds of the
    caller's clock.
    """

    def __init__(self, limit: int | None, *, from_the_start: bool = False) -> None:
        self._limit = limit
        self.count = 0
        """Number of restarts since the server started."""
        self.in_a_row = 0
        """Number of restarts since a group last stayed ready for ``STABLE_AFTER_S`` seconds."""
        self.due_at: float | None = None
        """The time at which the agents must be started again. None while they run, and after they were given up."""
        self.is_given_up = False
        self.has_been_ready = from_the_start
        self._ready_at: float | None = None

    def started(self) -> None:
        """Records that the agents are being started."""
        self.due_at = None

    def ready(self, now: float) -> None:
        """Records that all agents are ready."""
        self._ready_at = now
        self.has_been_ready = True

    def lost(self, now: float) -> float | None:
        """Records that the group was lost. Returns the seconds until the next start, or None if the group is given up.
        """
        if self._ready_at is not None and now - self._ready_at >= STABLE_AFTER_S:
            self.in_a_row = 0
        self._ready_at = None
        is_last = self._limit is not None and self.in_a_row >= self._limit
        self.is_given_up = is_last or not self.has_been_ready
        if self.is_given_up:
            return None
        backoff = backoff_after(self.in_a_row)
        self.due_at = now + backoff
        self.count += 1
        self.in_a_row += 1
        return backoff


class AgentStates:
    """Collects the status of a replica's agents for status pages: process, state, restarts and steps.

    The server knows some of these values. For the others, the executor asks the agents, and passes their replies to
    ``add``. Any thread may call ``describe``.

    ``addresses``: the address of each agent on this machine, in order of rank. It is empty if the agents are on other
    machines. The ``members`` that methods take are the agents of the running group.
    """

    def __init__(self, config: Config, replica: int, addresses: Sequence[str], restarts: Restarts) -> None:
        self.is_wanted = False
        """True from a request for the status until all agents have replied. If the group of agents is not ready, or is
        lost before its replies, the executor asks the next group that is ready.
        """
        self._config = config
        self._replica = replica
        self._ranks = group_ranks(replica, config.parallel_config)
        self._addresses = dict(zip(self._ranks, addresses, strict=False))
        self._restarts = restarts
        self._replies: dict[int, StatusReply] = {}

    def ask(self) -> None:
        """Begins to collect replies of all agents. Forgets the replies to an earlier request."""
        self.is_wanted = True
        self._replies.clear()

    def lose(self) -> None:
        """Forgets the replies that have arrived, because their agents were lost."""
        self._replies.clear()

    def add(self, member: int, reply: StatusReply, members: Sequence[Member]) -> AgentStatus | None:
        """Processes the reply of the agent with number ``member`` in the group.

        Returns the status of all agents after the last missing reply, otherwise None.
        """
        self._replies[member] = reply
        if len(self._replies) < len(self._ranks):
            return None
        self.is_wanted = False
        agents = self.describe(members)
        for index, agent in enumerate(agents):
            said = self._replies[index]
            agent.update(steps=said.steps, queued=said.queued, rss_bytes=said.rss_bytes)
        self._replies.clear()
        return AgentStatus(agents)

    def describe(self, members: Sequence[Member]) -> list[dict[str, object]]:
        """Returns rank, pid, state, restarts and other values of each agent, for status pages."""
        by_rank = {member.rank: member for member in members}
        return [self._describe(rank, by_rank.get(rank)) for rank in self._ranks]

    def _describe(self, rank: int, member: Member | None) -> dict[str, object]:
        where = place(rank, self._config.parallel_config)
        state = "ready" if member and member.is_ready else "starting" if member else self._state_without_member()
        return {
            "rank": rank,
            "replica": self._replica,
            "tensor_parallel_index": where.tp_index,
            "pipeline_stage": where.pp_index,
            "state": state,
            "pid": member.pid if member else None,
            "address": member.address if member else self._addresses.get(rank, ""),
            "restarts": self._restarts.count,
            **({"summary": dict(member.summary)} if member and member.is_ready else {}),
        }

    def _state_without_member(self) -> str:
        if self._restarts.is_given_up:
            return "stopped"
        if self._restarts.due_at is not None:
            return "restarting"
        return "starting" if self._addresses else "waiting for a node"
