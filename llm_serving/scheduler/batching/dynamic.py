"""Dynamic batching: a batch leaves when it is full or late, and the next one waits until it has ended."""

from __future__ import annotations

from llm_serving.scheduler.batching.static import StaticBatching
from llm_serving.scheduler.sequence import Sequence

__all__ = ["DynamicBatching"]


class DynamicBatching(StaticBatching):
    """As model servers batch calls of a model without state (Clipper, Crankshaw et al. 2017): up to ``batch_size``
    requests are collected, for ``batch_waiting_time`` seconds after the first at most. Once it has left, a batch is
    as in static batching."""

    def _may_leave(self, first: Sequence, now: float) -> bool:
        limits = self._state.limits
        deadline = first.request.arrival_time + limits.batch_waiting_time
        if len(self._state.waiting) >= limits.max_batch_size or deadline <= now:
            return True
        self._state.wake_at(deadline)
        return False
