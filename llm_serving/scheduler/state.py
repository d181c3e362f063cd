"""What the parts of the scheduler work on together."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.scheduler.in_flight import InFlightSteps
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.request_queue import RequestQueue
from llm_serving.scheduler.running import RunningSet

__all__ = ["SchedulerState"]


@dataclass(slots=True)
class SchedulerState:
    """The requests by where they are, the steps in flight, and when to look again."""

    limits: SchedulerLimits
    waiting: RequestQueue
    running: RunningSet
    in_flight: InFlightSteps
    num_arrivals: int = 0
    """Requests taken in since the start; the arrival index of the next."""
    num_started: int = 0
    """Requests that have started and not ended, wherever they are now."""
    wakeup: float | None = None
    """When something that the last ``schedule`` held back has waited long enough."""

    def wake_at(self, deadline: float) -> None:
        """Look again then, at the latest."""
        self.wakeup = deadline if self.wakeup is None else min(self.wakeup, deadline)
