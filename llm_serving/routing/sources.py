"""The interface through which the engine uses a single scheduler, or a router in front of several schedulers."""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.block_moves.tier_moves import BlockKey, WantedBlocks
from llm_serving.routing.replica import RoutedReplica
from llm_serving.routing.router import Router
from llm_serving.scheduler.figures import Figures
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler


class ReplicaSource:
    """One replica behind a router, with the methods of ``Scheduler`` for steps and results."""

    def __init__(self, router: Router, replica: RoutedReplica) -> None:
        self._router = router
        self._replica = replica

    @property
    def figures(self) -> Figures:
        return self._replica.scheduler.figures

    @property
    def num_preemptions(self) -> int:
        return self._replica.scheduler.num_preemptions

    def offer_drafts(self, offers: list[tuple[str, list[int]]]) -> None:
        self._replica.scheduler.offer_drafts(offers)

    def fresh_blocks(self, limit: int) -> list[BlockKey | None]:
        return self._replica.scheduler.fresh_blocks(limit)

    def store_blocks(self, hosts: Iterable[int]) -> None:
        self._replica.scheduler.store_blocks(hosts)

    def take_wanted(self) -> list[WantedBlocks]:
        return self._replica.scheduler.take_wanted()

    def load_blocks(self, request_id: str, first: int, hosts: Iterable[int]) -> None:
        self._replica.scheduler.load_blocks(request_id, first, hosts)

    def take_released(self) -> list[tuple[int, bool]]:
        return self._replica.scheduler.take_released()

    def schedule(self, now: float) -> ScheduledStep | None:
        return self._router.schedule(self._replica, now)

    def next_wakeup(self, now: float) -> float | None:
        return self._router.next_wakeup(self._replica, now)

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        return self._router.update(self._replica, result, now)

    def void_steps(self) -> list[int]:
        return self._replica.scheduler.void_steps()

    def agent_lost(self, now: float, *, blameless: bool = False) -> None:
        self._router.agent_lost(self._replica, now, blameless=blameless)

    def distrust_blocks(self, now: float, *, recompute: bool) -> None:
        self._router.distrust_blocks(now, recompute=recompute)


def replica_sources(router: Router) -> list[ReplicaSource]:
    """Returns a ``ReplicaSource`` for each replica of a router."""
    return [ReplicaSource(router, replica) for replica in router.replicas]


RequestFront = Scheduler | Router
"""The object to which the engine gives requests: the scheduler of a single replica, or the router of several replicas.
"""

StepSource = Scheduler | ReplicaSource
"""The object from which the engine gets the steps of one replica, and to which it returns their results."""
