"""The counts of a scheduler that go with its records."""

from __future__ import annotations

from llm_serving.scheduler.scheduler import Scheduler

STATE_NAMES = ("running", "waiting", "free blocks", "preemptions", "steps in flight", "swapped", "swaps")

Counts = tuple[int, int, int, int, int, int, int]
"""What ``Scheduler.counts`` returns, see ``STATE_NAMES``."""


def state_of(scheduler: Scheduler) -> list[int]:
    """The counts that go with each record, in the order of ``STATE_NAMES``."""
    return list(scheduler.counts())
