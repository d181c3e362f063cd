"""The engine's interface to its scheduler, or to a router with several schedulers.

A ``Scheduler`` is both a ``RequestFront`` and a ``StepSource``. A ``Router`` is a ``RequestFront``, and each of its
replicas has a ``ReplicaSource``.
"""

from __future__ import annotations

from typing import Protocol

from llm_serving.errors import QueueFullError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.replica import RoutedReplica
from llm_serving.routing.router import Router
from llm_serving.scheduler.figures import Figures
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult

__all__ = ["ReplicaSource", "RequestFront", "StepSource", "replica_sources"]


class RequestFront(Protocol):
    """Takes requests, and ends them from outside. See ``Scheduler``."""

    @property
    def figures(self) -> Figures: ...

    @property
    def is_idle(self) -> bool: ...

    def add_request(self, request: Request) -> None: ...

    def queue_full(self) -> QueueFullError | None: ...

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None: ...

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None: ...

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]: ...

    def take_ended(self) -> list[RequestUpdate]: ...

    def check_integrity(self) -> None: ...


class StepSource(Protocol):
    """Gives the steps of one replica, and takes their results. See ``Scheduler``."""

    @property
    def figures(self) -> Figures: ...

    @property
    def num_preemptions(self) -> int: ...

    def schedule(self, now: float) -> ScheduledStep | None: ...

    def next_wakeup(self, now: float) -> float | None: ...

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]: ...

    def void_steps(self) -> list[int]: ...

    def agent_lost(self, now: float) -> None: ...


class ReplicaSource:
    """The ``StepSource`` of one replica behind a router."""

    def __init__(self, router: Router, replica: RoutedReplica) -> None:
        self._router = router
        self._replica = replica

    @property
    def figures(self) -> Figures:
        return self._replica.scheduler.figures

    @property
    def num_preemptions(self) -> int:
        return self._replica.scheduler.num_preemptions

    def schedule(self, now: float) -> ScheduledStep | None:
        return self._router.schedule(self._replica, now)

    def next_wakeup(self, now: float) -> float | None:
        return self._router.next_wakeup(self._replica, now)

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        return self._router.update(self._replica, result, now)

    def void_steps(self) -> list[int]:
        return self._replica.scheduler.void_steps()

    def agent_lost(self, now: float) -> None:
        self._router.agent_lost(self._replica, now)


def replica_sources(router: Router) -> list[ReplicaSource]:
    """Creates a source for each replica of a router."""
    return [ReplicaSource(router, replica) for replica in router.replicas]
