"""Collects the replies of all replicas' agents to probes and profile commands, in the engine thread."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.engine.outputs import ProbeAnswer, ProfileAnswer
from llm_serving.engine.replica import Replica


class AgentReplies:
    """Asks the agents of several replicas. After the reply of the last replica, a method returns the answer."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self.probed: set[int] = set()
        """The replicas that have not replied to the probe."""
        self._profiling: set[int] = set()
        self._profiled: list[dict[str, object]] = []

    def probe(self) -> None:
        """Ask the agents of all ready replicas for their status. If no replica is ready, ask all agents."""
        asked = [replica for replica in self._replicas if replica.is_ready] or self._replicas
        self.probed = {replica.index for replica in asked}
        for replica in asked:
            replica.executor.request_status()

    def note_probe(self, replica: int) -> list[ProbeAnswer]:
        """Note that the agents of a replica have replied to a probe or were lost."""
        if replica not in self.probed:
            return []
        self.probed.remove(replica)
        return [] if self.probed else [ProbeAnswer()]

    def profile(self, folder: str | None) -> list[ProfileAnswer]:
        """Start a profile of the agents of all ready replicas, or stop it if ``folder`` is None.

        If no replica is ready, returns the answer immediately.
        """
        asked = [replica for replica in self._replicas if replica.is_ready]
        self._profiling, self._profiled = {replica.index for replica in asked}, []
        for replica in asked:
            replica.executor.profile(folder)
        return [] if asked else [ProfileAnswer([])]

    def note_profile(self, replica: int, agents: list[dict[str, object]]) -> list[ProfileAnswer]:
        """Note the replies of a replica's agents to a command for profiles."""
        if replica not in self._profiling:
            return []
        self._profiling.remove(replica)
        self._profiled += agents
        return [] if self._profiling else [ProfileAnswer(self._profiled)]
