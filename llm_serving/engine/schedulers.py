"""Makes the scheduler of each replica, and the router in front of several schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from llm_serving.config import Config
from llm_serving.engine.roles import prefill_split
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.flight.recorder import FlightRecorder, as_scheduler
from llm_serving.kvcache.prefix_index import IndexObserver
from llm_serving.routing.placement import Routing
from llm_serving.routing.pools import PromptPool, PromptPools
from llm_serving.routing.router import Router
from llm_serving.routing.sources import StepSource, replica_sources
from llm_serving.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from llm_serving.handover.transport import BlockPools


class ServingObserver(IndexObserver, Protocol):
    """Observes the prefix cache of one replica."""

    def enter_service(self) -> None:
        """Is called by the model registry when the replica begins to serve.

        From then on, this object reports the cache of this replica instead of the cache of an earlier engine.
        """


ObserveCache = Callable[[int], ServingObserver]
"""A function that takes the number of a replica and returns the observer of its prefix cache, which is still empty."""
Record = Callable[[Scheduler, int], FlightRecorder | None]
"""A function that takes a scheduler and the number of its replica. Returns the recorder that wraps it, or None."""


def make_schedulers(
    config: Config, count: int, observers: Sequence[IndexObserver], record: Record | None
) -> tuple[list[Scheduler], list[FlightRecorder]]:
    """Returns a scheduler for each of ``count`` replicas, and the flight recorders that wrap them.

    ``observers`` has the observer of each replica's prefix cache, or is empty. If a scheduler has a recorder, the first
    list has the recorder instead of the scheduler.
    """
    limits, schedulers, recorders = scheduler_limits(config), list[Scheduler](), list[FlightRecorder]()
    for index in range(count):
        scheduler = Scheduler(limits)
        if observers:
            scheduler.observe_cache(observers[index])
        recorder = None if record is None else record(scheduler, index)
        if recorder is not None:
            recorders.append(recorder)
            scheduler = as_scheduler(recorder)
        schedulers.append(scheduler)
    return schedulers, recorders


def make_front(
    config: Config, schedulers: Sequence[Scheduler], pools: BlockPools | None, *, on_nodes: bool
) -> tuple[Scheduler | Router, list[StepSource]]:
    """Returns the object that accepts requests, and, for each replica, the object that makes its steps.

    If there is one replica on this machine, the scheduler does both. With several replicas, or if the agents are on
    nodes (``on_nodes``), a router accepts requests. ``pools`` are the hand-over pools of replicas on several machines.
    """
    if len(schedulers) == 1 and not on_nodes:
        return schedulers[0], [*schedulers]
    split = prefill_split(config, schedulers[0].limits, pools)
    router = Router(schedulers, Routing(config.parallel_config.routing), split, prompt_pools(config))
    return router, [*replica_sources(router)]


def prompt_pools(config: Config) -> PromptPools | None:
    """Returns the pools of replicas by prompt length, or None if the config has none."""
    pools = config.parallel_config.pools
    if pools is None:
        return None
    return PromptPools(PromptPool(pool.name, pool.replicas, pool.max_prompt_tokens) for pool in pools)
