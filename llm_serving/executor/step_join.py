"""Joins the replies of a group's agents: a step has completed when every agent has replied."""

from __future__ import annotations

import time
from collections.abc import Iterable

from llm_serving.errors import AgentLostError
from llm_serving.ipc.messages import StepDone, StepFailed


class StepJoin:
    """Collects the replies of a group's agents to each step. A step is complete when all agents have replied.

    The agents of a group run a step together. If all agents refuse a step, only this step has failed. If only some
    agents fail the step, the other agents may wait for them forever. Then the group must be restarted, and the step's
    requests end with an error. ``torn`` is the reason for this restart. It is set when all agents have replied, or by
    ``check_overdue`` if replies are missing at the time ``overdue_at``. ``first_rank`` is the rank of the first agent,
    for messages. ``answering`` is the number, in the group, of the agent that samples.

    If the failed agents only could not sample (``StepFailed.only_sampling``), the group continues, and only this step
    has failed. This is safe. The failed agents have computed their parts of the step and published its tokens. All
    other agents have replied ``StepDone``, so they have done their parts, too. Therefore, each agent has taken part in
    the same sums and gathers, and its counters in the exchange are the same as without the failure.
    """

    GRACE_S = 5.0
    """Maximum time for the replies of the other agents after one agent has failed a step."""

    def __init__(self, num_agents: int, first_rank: int, answering: int = 0) -> None:
        self._num_agents = num_agents
        self._first_rank = first_rank
        self._answering = answering
        self._replies: dict[int, dict[int, StepDone | StepFailed]] = {}
        self._failed: dict[int, float] = {}
        self.torn: str | None = None
        """The reason why the group cannot continue. None while it can continue."""

    def add(self, member: int, reply: StepDone | StepFailed) -> StepDone | StepFailed | None:
        """Processes an agent's reply. ``member`` is its number in the group.

        Returns None until the last reply. Then returns one reply for the whole group, with the times of the agent that
        samples. If one agent failed, the step has failed. Raises AgentLostError if an agent replies twice, or if the
        agents name different slots.
        """
        replies = self._replies.setdefault(reply.seq, {})
        if member in replies or any(other.slot != reply.slot for other in replies.values()):
            raise AgentLostError(
                f"agent {self._first_rank + member} answered step {reply.seq} in slot {reply.slot} twice, or in "
                "another slot than the others"
            )
        replies[member] = reply
        if isinstance(reply, StepFailed):
            self._failed.setdefault(reply.seq, time.monotonic())
        if len(replies) < self._num_agents:
            return None
        del self._replies[reply.seq]
        failures = _failures(replies)
        if not failures:
            done = {number: each for number, each in replies.items() if isinstance(each, StepDone)}
            return _joined(done[self._answering], list(done.values()))
        del self._failed[reply.seq]
        only_sampling = {each.only_sampling for each in failures.values()}
        if len(failures) < self._num_agents and False in only_sampling:
            self.torn = f"{self._failed_agents(replies)} failed step {reply.seq}, and the rest of the group did not"
        elif len(only_sampling) > 1:
            self.torn = f"{self._failed_agents(replies)} failed step {reply.seq} in different ways"
        return StepFailed(seq=reply.seq, slot=reply.slot, error=_text(failures.values()))

    def missing(self, seq: int) -> list[int]:
        """Returns the ranks of the agents that have not replied to a step."""
        replies = self._replies.get(seq, {})
        return [self._first_rank + member for member in range(self._num_agents) if member not in replies]

    @property
    def overdue_at(self) -> float | None:
        """The time from which the replies to a failed step are overdue, by ``time.monotonic``. None if no step failed.
        """
        return min(self._failed.values()) + self.GRACE_S if self._failed else None

    def check_overdue(self, now: float) -> None:
        """Sets ``torn``, the reason why the group cannot continue, if the replies to a failed step are overdue."""
        if (due := self.overdue_at) is not None and now >= due:
            seq = min(self._failed)
            waited = ", ".join(str(rank) for rank in self.missing(seq))
            failed = self._failed_agents(self._replies[seq])
            self.torn = f"{failed} failed step {seq}, and no answer came from agents {waited} within {self.GRACE_S:g} s"

    def discount(self, pause_s: float) -> None:
        """Moves the deadlines for the replies to failed steps by ``pause_s``, the seconds for which this process was
        paused.
        """
        self._failed = {seq: at + pause_s for seq, at in self._failed.items()}

    def take_failures(self) -> list[tuple[int, str]]:
        """Returns (step number, error text) of each incomplete step for which at least one agent has reported an error.

        Forgets all replies.
        """
        found = [(seq, _text(_failures(self._replies[seq]).values())) for seq in sorted(self._failed)]
        self._replies.clear()
        self._failed.clear()
        self.torn = None
        return found

    def _failed_agents(self, replies: dict[int, StepDone | StepFailed]) -> str:
        failed = _failures(replies)
        ranks = ", ".join(str(self._first_rank + member) for member in sorted(failed))
        return f"agent{'s' if len(failed) > 1 else ''} {ranks}"


def _failures(replies: dict[int, StepDone | StepFailed]) -> dict[int, StepFailed]:
    return {member: each for member, each in replies.items() if isinstance(each, StepFailed)}


def _text(failures: Iterable[StepFailed]) -> str:
    """Returns the agents' error texts, each text once."""
    return "; ".join(dict.fromkeys(each.error for each in failures))


def _joined(answer: StepDone, replies: list[StepDone]) -> StepDone:
    """Returns the reply of the whole group. ``answer`` is the reply of the agent that samples.

    The other agents wait for this agent in the next step, while it still samples or makes drafts. So their times would
    count the same wait twice.
    """
    return StepDone(
        seq=answer.seq,
        slot=answer.slot,
        queue_us=answer.queue_us,
        graph_us=answer.graph_us,
        sample_us=answer.sample_us,
        draft_us=answer.draft_us,
        fetched_bytes=sum(each.fetched_bytes for each in replies),
        device_draws=max(each.device_draws for each in replies),
        wrong_draws=max(each.wrong_draws for each in replies),
        second_launches=max(each.second_launches for each in replies),
    )
