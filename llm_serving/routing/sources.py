"""The interfaces through which the engine uses one scheduler, or a router with several schedulers.

A ``Scheduler`` is both a ``RequestFront`` (requests) and a ``StepSource`` (steps). With several replicas, the
``Router`` is the ``RequestFront``, and each replica has a ``ReplicaSource``.
"""

from __future__ import annotations

from typing import Protocol

from llm_serving.errors import QueueFullError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.replica import RoutedReplica
from llm_serving.routing.router import Router
from llm_serving.scheduler.figures import Figures
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult


class RequestFront(Protocol):
    """Accepts requests and ends them at the client's or the engine's wish. ``Scheduler`` documents the methods."""

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
    """Returns the next step of one replica and receives results. ``Scheduler`` documents the methods."""

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
    """Returns the ``StepSource`` of each replica of a router."""
    return [ReplicaSource(router, replica) for replica in router.replicas]
