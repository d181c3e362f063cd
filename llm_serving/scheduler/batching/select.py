"""The batching mode of a strategy."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.scheduler.batching.base import BatchingMode, BatchingStrategy
from llm_serving.scheduler.batching.continuous import ContinuousBatching
from llm_serving.scheduler.batching.dynamic import DynamicBatching
from llm_serving.scheduler.batching.none import NoBatching
from llm_serving.scheduler.batching.static import StaticBatching
from llm_serving.scheduler.state import SchedulerState

__all__ = ["select_batching"]

_MODES: dict[BatchingStrategy, Callable[[SchedulerState], BatchingMode]] = {
    BatchingStrategy.NONE: NoBatching,
    BatchingStrategy.STATIC: StaticBatching,
    BatchingStrategy.DYNAMIC: DynamicBatching,
    BatchingStrategy.CONTINUOUS: ContinuousBatching,
}


def select_batching(state: SchedulerState) -> BatchingMode:
    """The mode that ``state.limits.batching`` names."""
    return _MODES[state.limits.batching](state)
