"""The executor as the engine sees it: steps go in, results and news of the agents come out.

There is one for each replica of the model; its agents are one group, ready together and lost together.

One thread, the engine's, calls everything but ``wake`` and ``agents``, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from llm_serving.scheduler.output import ScheduledStep, StepResult

__all__ = ["AgentLost", "AgentReady", "AgentStatus", "Executor", "ExecutorEvent"]


@dataclass(frozen=True, slots=True)
class AgentReady:
    """Every agent is ready and holds no state: steps may be submitted from now on.

    The first one comes after the start, the next ones after a loss.
    """

    summary: Mapping[str, object] = field(default_factory=dict)
    """For the log: device, op table, bytes of weights and KV cache, seconds per stage."""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent died or stopped answering, and the group was ended with it. Every step in flight is void and no result
    of one follows.

    Unless ``final``, an ``AgentReady`` follows when the agents have been restarted; nothing is submitted before.
    """

    error: str
    final: bool = False
    """The agent is given up: no restart will be tried."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """Every agent answered a ``request_status``."""

    agents: list[dict[str, object]]


ExecutorEvent = StepResult | AgentReady | AgentLost | AgentStatus


class Executor(Protocol):
    """Carries steps to the agents and back. It starts and restarts agents on its own, or with the launcher."""

    @property
    def num_free_slots(self) -> int:
        """Steps that can be submitted now. A slot is free again once its result has come out of ``poll``."""

    def submit(self, step: ScheduledStep) -> None:
        """Send a step; never blocks for long. The step's lists are read here and not kept.

        Raises LLMServingError when the step cannot be written or sent; then no result of it follows. A connection
        found dead is not an error here: the step counts as sent and ``poll`` reports ``AgentLost``.
        """

    def abort(self, seq: int) -> None:
        """Ask the agents to drop step ``seq`` if it has not begun. Its StepResult comes in any case."""

    def request_status(self) -> None:
        """Ask every agent how it is; ``poll`` reports ``AgentStatus`` when all have answered."""

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        """What has happened, in order. Waits up to ``timeout_s`` (None: as long as it takes) for something.

        Returns an empty list after the timeout or a ``wake``.
        """

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` has something to give, a ``wake`` among it: for whoever waits
        for several executors at once."""

    def next_due(self) -> float | None:
        """When, by ``time.monotonic``, ``poll`` has something to do though nothing becomes readable: a step that was
        not answered in time, a restart. None when nothing is due."""

    def wake(self) -> None:
        """Make the running ``poll``, or else the next one, return at once. Any thread may call it."""

    def agents(self) -> list[dict[str, object]]:
        """What is known of each agent now (rank, pid, state, restarts ...). Any thread may call it."""
