"""Collects the replies of all replicas' agents to probes and profile commands, in the engine thread."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.engine.outputs import ProbeAnswer, ProfileAnswer
from llm_serving.engine.replica import Replica


class AgentReplies:
    """Asks the agents of several replicas, and collects their replies. After the last reply, ``note_probe`` or
    ``note_profile`` returns the answer for the event loop.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self.probed: set[int] = set()
        """The replicas that have not replied to the probe."""
        self._profiling: set[int] = set()
        """The replicas that have not replied to the newest command for profiles."""
        self._profile_number = 0
        self._profiled: list[dict[str, object]] = []

    def probe(self) -> None:
        """Asks the agents of all ready replicas for their status. If no replica is ready, asks all agents."""
        asked = [replica for replica in self._replicas if replica.is_ready] or self._replicas
        self.probed = {replica.index for replica in asked}
        for replica in asked:
            replica.executor.request_status()

    def note_probe(self, replica: int) -> list[ProbeAnswer]:
        """Records that the agents of a replica have replied to a probe or were lost."""
        if replica not in self.probed:
            return []
        self.probed.remove(replica)
        return [] if self.probed else [ProbeAnswer()]

    def profile(self, number: int, folder: str | None) -> list[ProfileAnswer]:
        """Starts a profile of the agents of all ready replicas, or stops it if ``folder`` is None.

        ``number`` is the number of the command. Returns the answers that are known immediately. If an earlier command
        has no answer yet, this command replaces it, and the result has the answer to the earlier command. If no replica
        is ready, the result has the answer to this command.
        """
        answers: list[ProfileAnswer] = []
        for index in sorted(self._profiling):
            answers += self.note_lost(index, "a later command for profiles came before the agents' replies")
        asked = [replica for replica in self._replicas if replica.is_ready]
        self._profile_number, self._profiling, self._profiled = number, {replica.index for replica in asked}, []
        for replica in asked:
            if not replica.executor.profile(folder):
                answers += self.note_lost(replica.index, "the agents are not ready")
        return answers if asked else [*answers, ProfileAnswer(number, [])]

    def note_profile(self, replica: int, agents: list[dict[str, object]]) -> list[ProfileAnswer]:
        """Records the replies of a replica's agents to the newest command for profiles."""
        if replica not in self._profiling:
            return []
        self._profiling.remove(replica)
        self._profiled += agents
        return [] if self._profiling else [ProfileAnswer(self._profile_number, self._profiled)]

    def note_lost(self, replica: int, reason: str) -> list[ProfileAnswer]:
        """Records that the agents of a replica will not reply to the newest command for profiles."""
        return self.note_profile(replica, [{"replica": replica, "error": reason}])
