"""Static batching: what waits when the device becomes free runs as one batch, to the end of its longest request."""

from __future__ import annotations

from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState

__all__ = ["StaticBatching"]


class StaticBatching:
    """A batch opens when no request is under way: what waits at that moment is in it, up to ``batch_size`` requests
    and as many as rows and cache take. Nobody joins before all of it have ended.

    An answer is complete when its own last token is sampled, and the row is not computed any further, nor filled
    again: the batch shrinks until its longest request ends. (Servers with graphs of one batch size go on computing
    the dead rows, so a comparison with this mode flatters static batching rather than the others.)
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._places = 0
        self._num_arrivals = 0

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        if self._state.num_started == 0:
            if not self._may_leave(sequence, now):
                return False
            self._places = self._state.limits.max_batch_size
            self._num_arrivals = self._state.num_arrivals
        return self._places > 0 and sequence.arrival_index < self._num_arrivals

    def _may_leave(self, first: Sequence, now: float) -> bool:
        """Whether the batch that ``first`` opens may leave now."""
        return True

    def started(self, sequence: Sequence) -> None:
        self._places -= 1

    def held_up(self) -> None:
        """The batch is as large as it gets; who comes when rows and blocks are free again is in the next."""
        if self._state.num_started:
            self._places = 0
