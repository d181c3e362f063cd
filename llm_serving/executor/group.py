"""The agents of a replica, as the executor sees them. ``AgentGroup`` implements ``Group`` for this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from llm_serving.errors import AgentError
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.host_pool import HostPool
from llm_serving.ipc.messages import AdapterLoad, AgentMessage, ServerMessage
from llm_serving.ipc.shm import StepSlot

Received = list[tuple[int, AgentMessage]]
"""Messages for the engine, in order. Each has the number of its agent in the group."""


class HasDescriptor(Protocol):
    """An object that a selector can watch."""

    def fileno(self) -> int: ...


Source = tuple[HasDescriptor | int, Callable[[], Received]]
"""A pair: a descriptor, and a function that returns the messages. The function must be called when the descriptor is
readable.

The function raises AgentError if an agent or the connection to it is lost.
"""


class Member(Protocol):
    """One agent of a group."""

    @property
    def rank(self) -> int: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def summary(self) -> Mapping[str, str | int | float]:
        """The ``summary`` of the agent's message ``Ready``, for logs and status pages. Empty until the agent is ready.
        """

    @property
    def pid(self) -> int | None:
        """The process id on the agent's machine. None while it is not known."""

    @property
    def address(self) -> str:
        """The address of the agent, or of the node on which it runs, for status pages."""


class Group(Protocol):
    """One run of the agents of a replica, from their start to their end. If one agent ends, all are ended."""

    @property
    def members(self) -> Sequence[Member]:
        """The agents, in order of rank."""

    @property
    def started_at(self) -> float:
        """The time at which the start began, by ``time.monotonic``."""

    @property
    def is_ready(self) -> bool:
        """Whether every agent is ready."""

    @property
    def is_leaving(self) -> bool:
        """True if the machine of the agents is drained. The agents end when their requests have ended."""

    @property
    def summary(self) -> dict[str, object]:
        """Values for the log: the summary of the agent that samples, and values of the group."""

    @property
    def slots(self) -> Sequence[StepSlot]:
        """The step slots, in which the executor writes steps and reads results."""

    @property
    def pools(self) -> Sequence[HostPool]:
        """The host blocks of each agent, in order of rank. Empty without KV tiers."""

    def sources(self) -> Sequence[Source]:
        """Returns the sources that the executor must watch. The result stays the same until ``kill``."""

    def note_progress(self) -> None:
        """Updates ``is_ready``. Call it after messages of a group that is not ready yet."""

    def send(self, message: ServerMessage) -> None:
        """Sends a message to every agent.

        A broken connection causes no error here. The function of this connection in ``sources`` raises it later.

        If the message names a step slot, the step's inputs or masks must already be in this slot.
        """

    def load_adapter(self, message: AdapterLoad, memory: AdapterMemory) -> None:
        """Makes every agent load the adapter in ``memory``, as ``message`` says. Each agent replies ``AdapterLoaded``.
        """

    def next_look(self, last_result: float | None) -> float | None:
        """Returns the time at which ``look`` must be called, by ``time.monotonic``. None means never.

        ``last_result`` is the time of the last result, or None if no step is in flight.
        """

    def look(self, now: float, last_result: float, slots: Iterable[int]) -> None:
        """Checks that the agents can still complete their step. Raises AgentError if they cannot.

        ``slots`` are the numbers of the slots of the steps in flight.
        """

    def describe_loss(self, noticed: AgentError) -> AgentError:
        """Returns the error ``noticed``. If this group knows more about the loss, the text of the error also states
        this.
        """

    def kill(self) -> None:
        """Kills all agents without waiting. The caller must call ``close`` later."""

    def close(self) -> None:
        """Ends all agents, waits until they have ended, and frees their resources."""

    def shutdown(self, seq: int) -> None:
        """Asks all agents to end, waits for a short time, then closes. ``seq`` is the number of the message."""


StartGroup = Callable[[], Group | None]
"""A function that starts a group of agents. It returns None if no machine is free for them now.

Whoever provides the function must then call ``Executor.wake`` when a machine may be free. The function raises
AgentStartError or OSError.
"""
