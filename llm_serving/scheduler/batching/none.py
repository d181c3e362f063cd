"""No batching: one request at a time, from its prompt to its last token."""

from __future__ import annotations

from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState

__all__ = ["NoBatching"]


class NoBatching:
    """The next request starts when the one before it has ended."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        return self._state.num_started == 0

    def started(self, sequence: Sequence) -> None:
        pass

    def held_up(self) -> None:
        pass
