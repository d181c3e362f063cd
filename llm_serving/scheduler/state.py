"""What the parts of the scheduler work on together."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.scheduler.in_flight import InFlightSteps
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.queue_order import QueueOrder
from llm_serving.scheduler.request_queue import RequestQueue
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.sequence import Sequence
from llm_serving.telemetry.receipt import WaitingLine

__all__ = ["SchedulerState"]


@dataclass(slots=True)
class SchedulerState:
    """The requests by where they are, the steps in flight, and when to look again."""

    limits: SchedulerLimits
    kv_cache: KVCacheManager
    order: QueueOrder
    """Of those in ``waiting`` that have not run yet."""
    waiting: RequestQueue
    running: RunningSet
    in_flight: InFlightSteps
    swapped: list[Sequence] = field(default_factory=list)
    """In order of arrival."""
    line: WaitingLine = field(default_factory=WaitingLine)
    """What holds up those in ``waiting``, for their receipts."""
    num_arrivals: int = 0
    """Requests taken in since the start; the arrival index of the next."""
    num_started: int = 0
    """Requests that have started and not ended, wherever they are now."""
    held_up: tuple[int, int, int] | None = None
    """Changes, free rows and free blocks when the first in line last found no room; see ``is_held_up``."""
    wakeup: float | None = None
    """When something that the last ``schedule`` held back has waited long enough."""

    @property
    def page_use(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        usable = self.kv_cache.num_usable_blocks
        return (usable - self.kv_cache.num_free_blocks) / usable

    def note_held_up(self) -> None:
        """There is no room for the first in line."""
        self.held_up = (self.running.num_changes, self.running.num_free_rows, self.kv_cache.num_free_blocks)

    @property
    def is_held_up(self) -> bool:
        """Whether nothing has changed for the better since the first in line found no room."""
        if self.held_up is None:
            return False
        num_changes, rows, blocks = self.held_up
        running = self.running
        return (
            num_changes == running.num_changes
            and running.num_free_rows <= rows
            and self.kv_cache.num_free_blocks <= blocks
        )

    def goes_after_preempted(self, sequence: Sequence) -> bool:
        """Whether somebody who was preempted starts, or comes back from the host, before this waiting sequence."""
        if self.running.num_preempted_leaving:
            return True
        is_new = sequence.request.first_scheduled_time is None
        return bool(self.swapped) and (is_new or self.swapped[0].arrival_index < sequence.arrival_index)

    def swap(self, sequence: Sequence) -> None:
        """A sequence's blocks are on the host."""
        insort(self.swapped, sequence, key=_arrival_index)

    def wake_at(self, deadline: float) -> None:
        """Look again then, at the latest."""
        self.wakeup = deadline if self.wakeup is None else min(self.wakeup, deadline)


def _arrival_index(sequence: Sequence) -> int:
    return sequence.arrival_index
