"""Many agents, one answer: a step of a group has ended when each of its agents has said so."""

from __future__ import annotations

import time
from collections.abc import Iterable

from llm_serving.errors import AgentLostError
from llm_serving.ipc.messages import StepDone, StepFailed


class StepJoin:
    """The answers to the steps in flight that are not complete. ``first_rank`` is the first agent's, for messages.

    Agents of a group go through a step together. If all refuse it, the step alone has failed. If only some did, the
    others may stand in the middle of it, waiting for what will never come: the step's requests end, and the group has
    to be started again. ``torn`` says so, at the latest when ``overdue_at`` has come.
    """

    GRACE_S = 5.0
    """How long the others may take to answer a step that one has failed."""

    def __init__(self, num_agents: int, first_rank: int) -> None:
        self._num_agents = num_agents
        self._first_rank = first_rank
        self._answers: dict[int, dict[int, StepDone | StepFailed]] = {}
        self._failed: dict[int, float] = {}
        self.torn: str | None = None
        """Why the group cannot go on; None while it can."""

    def add(self, member: int, answer: StepDone | StepFailed) -> StepDone | StepFailed | None:
        """Take an agent's answer (``member``: from 0). The group's, once every agent's is there.

        Its times are the longest of any agent's; a failure of any is the failure of the step. Raises AgentLostError
        when an agent answers a step twice, or in another slot than the others.
        """
        answers = self._answers.setdefault(answer.seq, {})
        if member in answers or any(other.slot != answer.slot for other in answers.values()):
            raise AgentLostError(
                f"agent {self._first_rank + member} answered step {answer.seq} in slot {answer.slot} twice, or in "
                "another slot than the others"
            )
        answers[member] = answer
        if isinstance(answer, StepFailed):
            self._failed.setdefault(answer.seq, time.monotonic())
        if len(answers) < self._num_agents:
            return None
        del self._answers[answer.seq]
        failures = self._failures(answers)
        if not failures:
            return _longest([each for each in answers.values() if isinstance(each, StepDone)])
        del self._failed[answer.seq]
        if len(failures) < self._num_agents:
            self.torn = f"{self._who_failed(answers)} failed step {answer.seq}, and the rest of the group did not"
        return StepFailed(seq=answer.seq, slot=answer.slot, error=_text(failures.values()))

    def missing(self, seq: int) -> list[int]:
        """Ranks that have not answered a step."""
        answered = self._answers.get(seq, {})
        return [self._first_rank + member for member in range(self._num_agents) if member not in answered]

    @property
    def overdue_at(self) -> float | None:
        """By ``time.monotonic``: when to stop waiting for the others' answers to a step that one has failed."""
        return min(self._failed.values()) + self.GRACE_S if self._failed else None

    def check_overdue(self, now: float) -> None:
        """Sets ``torn`` if that time has come."""
        if (due := self.overdue_at) is not None and now >= due:
            seq = min(self._failed)
            waited = ", ".join(str(rank) for rank in self.missing(seq))
            failed = self._who_failed(self._answers[seq])
            self.torn = f"{failed} failed step {seq}, and no answer came from agents {waited} within {self.GRACE_S:g} s"

    def take_failures(self) -> list[tuple[int, str]]:
        """Steps that an agent has failed and others have not answered, with the error; forgets everything."""
        found = [(seq, _text(self._failures(self._answers[seq]).values())) for seq in sorted(self._failed)]
        self._answers.clear()
        self._failed.clear()
        self.torn = None
        return found

    @staticmethod
    def _failures(answers: dict[int, StepDone | StepFailed]) -> dict[int, StepFailed]:
        return {member: each for member, each in answers.items() if isinstance(each, StepFailed)}

    def _who_failed(self, answers: dict[int, StepDone | StepFailed]) -> str:
        failed = self._failures(answers)
        ranks = ", ".join(str(self._first_rank + member) for member in sorted(failed))
        return f"agent{'s' if len(failed) > 1 else ''} {ranks}"


def _text(failures: Iterable[StepFailed]) -> str:
    """What the agents said, each thing once."""
    return "; ".join(dict.fromkeys(each.error for each in failures))


def _longest(answers: list[StepDone]) -> StepDone:
    first = answers[0]
    return StepDone(
        seq=first.seq,
        slot=first.slot,
        queue_us=max(each.queue_us for each in answers),
        graph_us=max(each.graph_us for each in answers),
        sample_us=max(each.sample_us for each in answers),
    )
