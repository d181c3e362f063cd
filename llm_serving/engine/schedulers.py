"""Makes the scheduler of each replica, with its flight recorder and the observer of its prefix cache."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.config import Config
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.flight.recorder import FlightRecorder, as_scheduler
from llm_serving.kvcache.prefix_index import IndexObserver
from llm_serving.scheduler.scheduler import Scheduler

ObserveCache = Callable[[int], IndexObserver]
"""Returns the observer of a replica's prefix cache, which is empty."""
Record = Callable[[Scheduler, int], FlightRecorder | None]
"""Takes a scheduler and the number of its replica. Returns the flight recorder that wraps the scheduler, or None."""


def make_schedulers(
    config: Config, count: int, observe: ObserveCache | None, record: Record | None
) -> tuple[list[Scheduler], list[FlightRecorder]]:
    """Returns a scheduler for each of ``count`` replicas, and the flight recorders that wrap them.

    Each scheduler that has a recorder is replaced by the recorder.
    """
    limits, schedulers, recorders = scheduler_limits(config), list[Scheduler](), list[FlightRecorder]()
    for index in range(count):
        scheduler = Scheduler(limits)
        if observe is not None:
            scheduler.observe_cache(observe(index))
        recorder = None if record is None else record(scheduler, index)
        if recorder is not None:
            recorders.append(recorder)
            scheduler = as_scheduler(recorder)
        schedulers.append(scheduler)
    return schedulers, recorders
