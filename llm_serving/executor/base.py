"""The executor as the engine sees it: steps go in, results and changes of the agents' state come out.

Each replica of the model has one executor. The agents of a replica are one group: they become ready together, and if
one is lost, all are ended. Only the engine thread calls the methods, except ``wake`` and ``agents``, which any thread
may call.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from llm_serving.scheduler.output import ScheduledStep, StepResult

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from llm_serving.ipc.adapters import AdapterMemory
    from llm_serving.ipc.host_pool import HostPool


@dataclass(frozen=True, slots=True)
class AgentReady:
    """Every agent is ready and has no state of earlier steps. From now on, steps may be submitted.

    The first ``AgentReady`` comes after the start. Every later one comes after a restart of lost agents.
    """

    summary: Mapping[str, object] = field(default_factory=dict)
    """Values for the log: device, op table, bytes of weights and KV cache, seconds of each stage of the start."""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent died or stopped replying, and its group was ended. Every step in flight is void and has no result.

    If the loss is not ``final``, the agents are restarted, and an ``AgentReady`` follows. Until then, no step may be
    submitted.
    """

    error: str
    final: bool = False
    """True if the agents are given up and not restarted."""
    failed_check: str = ""
    """The self-check that failed: ``row``, ``canary`` or ``logits``. Empty if no self-check failed."""
    step: int | None = None
    """Number of the step that failed the self-check, or None."""
    is_drained: bool = False
    """True if the agents' machine was drained, and the requests on these agents did not end in time."""

    @property
    def is_blameless(self) -> bool:
        """Whether no request can have caused the loss."""
        return self.is_drained or bool(self.failed_check)


@dataclass(frozen=True, slots=True)
class AgentLeaving:
    """The agents' machine is drained. The engine sends it no new requests, and calls ``release`` when none is left."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """Every agent replied to a ``request_status``."""

    agents: list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class AgentProfiled:
    """Every agent replied to the newest ``profile``."""

    agents: list[dict[str, object]]
    """Rank, error and summary of each agent."""


@dataclass(frozen=True, slots=True)
class AdapterAnswered:
    """Every agent replied to a ``load_adapter``."""

    number: int
    """The number that ``load_adapter`` returned."""
    error: str = ""
    """The reason why the adapter could not be loaded. Empty on success."""


ExecutorEvent = StepResult | AgentReady | AgentLost | AgentLeaving | AgentStatus | AgentProfiled | AdapterAnswered


class Executor(Protocol):
    """Sends steps to the agents and receives the results. It restarts lost agents."""

    @property
    def num_free_slots(self) -> int:
        """Number of steps that can be submitted now. When ``poll`` returns a result, its step slot becomes free."""

    def submit(self, step: ScheduledStep) -> None:
        """Sends a step. The call does not wait for the agents, and keeps no reference to the step's lists.

        Raises LLMServingError if the step cannot be written or sent. The step then has no result. A broken connection
        is not an error of this call: the step counts as sent, and ``poll`` reports ``AgentLost``.
        """

    def abort(self, seq: int) -> None:
        """Asks the agents to drop step ``seq`` if it has not begun.

        ``poll`` still returns a result of the step: a normal one, or one that states that the step was dropped.
        """

    def distrust(self, check: str, reason: str, step: int | None = None) -> None:
        """Restarts the agents, because a self-check outside of the executor failed. ``poll`` reports ``AgentLost``."""

    def publish_masks(self, seq: int, masks: Sequence[npt.NDArray[np.uint32]]) -> None:
        """Gives the agents the masks of a submitted step, in the order of ``ScheduledStep.constrained``.

        Each mask has a bit for each token of the vocabulary, which is 1 if the token is allowed: [mask_words] uint32.
        Call this method exactly once for each step with constrained sequences. It does nothing if the step has ended.
        """

    def request_status(self) -> None:
        """Asks every agent for its status. ``poll`` reports ``AgentStatus`` when all have replied."""

    def profile(self, folder: str | None) -> bool:
        """Starts a profile of every agent with files in ``folder``. If ``folder`` is None, stops the profile.

        ``poll`` reports ``AgentProfiled`` when all agents have replied to the newest call. If the agents are lost
        earlier, it reports ``AgentLost`` instead. Returns False if the agents are not ready. No event follows then.
        """

    def load_adapter(self, slot: int, memory: AdapterMemory) -> int | None:
        """Loads a LoRA adapter into an adapter slot of every agent, after the steps in flight.

        Returns the number of the load. ``poll`` reports ``AdapterAnswered`` with this number when all agents have
        replied, unless they are lost or the adapter is dropped before. Returns None if the agents are not ready. They
        then load the adapter before their first step, and no event follows. Restarted agents load the adapter again,
        until another adapter gets the slot or ``drop_adapter`` is called.
        """

    def drop_adapter(self, slot: int) -> None:
        """Forgets the adapter of a slot, so that restarted agents do not load it. If it is being loaded, no
        ``AdapterAnswered`` follows.
        """

    def host_pools(self) -> Sequence[HostPool]:
        """Returns the host blocks of each ready agent, in order of rank. Empty without KV tiers."""

    def release(self) -> None:
        """Ends the agents of a machine that is being drained. Call this method after the event ``AgentLeaving``, when
        the agents have no requests any more.

        ``poll`` reports ``AgentReady`` when new agents on another machine are ready.
        """

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        """Returns the next events in order. If there are none, waits up to ``timeout_s``. None means no limit.

        The result is empty after the timeout or a ``wake``.
        """

    def fileno(self) -> int:
        """Returns a descriptor that is readable while ``poll`` has an event or was woken. With it, the engine waits for
        several executors at the same time.
        """

    def next_due(self) -> float | None:
        """Returns when ``poll`` must run even if no descriptor becomes readable, by ``time.monotonic``.

        Examples are the timeout of a step and a restart. None if nothing is due.
        """

    def wake(self) -> None:
        """Makes the present or the next ``poll`` return immediately. Any thread may call this method."""

    def agents(self) -> list[dict[str, object]]:
        """Returns rank, pid, state, restarts and other values of each agent. Any thread may call this method."""


Poll = Callable[[float | None], list[tuple[int, ExecutorEvent]]]
"""The type of ``Executor.poll`` for several executors. Each event comes with the index of its executor."""


def poll_all(executors: Sequence[Executor]) -> Poll:
    """Returns a function that polls the executors that have events. If none has an event, the function waits."""
    if len(executors) == 1:
        [only] = executors
        return lambda timeout_s: [(0, event) for event in only.poll(timeout_s)]
    return _SeveralExecutors(executors).poll


class _SeveralExecutors:
    """Waits for events of several executors with an epoll object, which is closed when this object is freed.

    A selector of the standard library is part of a reference cycle. It would stay open until a garbage collection.
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._epoll = select.epoll()
        self._indices = {executor.fileno(): index for index, executor in enumerate(executors)}
        for descriptor in self._indices:
            self._epoll.register(descriptor, select.EPOLLIN)

    def poll(self, timeout_s: float | None) -> list[tuple[int, ExecutorEvent]]:
        due = [executor.next_due() for executor in self._executors]
        times = [at for at in due if at is not None]
        if times:
            until = max(0.0, min(times) - time.monotonic())
            timeout_s = until if timeout_s is None else min(until, timeout_s)
        active = {self._indices[descriptor] for descriptor, _ in self._epoll.poll(timeout_s)}
        if times:
            now = time.monotonic()
            active.update(index for index, at in enumerate(due) if at is not None and at <= now)
        return [(index, event) for index in sorted(active) for event in self._executors[index].poll(0.0)]
