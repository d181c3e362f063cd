"""Batching modes: which of the waiting requests may start beside those that run (``model_config.batching_strategy``).

A mode says who may start, the policy (``policies/``) says in which steps they and the others then run: any mode goes
with any policy. Requests that have started before, and were preempted, belong to the batch and are not asked about.
"""

from __future__ import annotations

import enum
from typing import Protocol

from llm_serving.scheduler.sequence import Sequence

__all__ = ["BatchingMode", "BatchingStrategy"]


class BatchingStrategy(enum.Enum):
    """``model_config.batching_strategy``; see the file of each."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


class BatchingMode(Protocol):
    """Decides on new requests, one after the other, in the order of the queue."""

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        """Whether the first in line may start now. ``beside``: in a step that has prompts already. A mode that wants
        to be asked again at a certain time sets ``SchedulerState.wake_at``."""

    def started(self, sequence: Sequence) -> None:
        """It has."""

    def held_up(self) -> None:
        """The first in line may start, but there is no row for it, or no room in the cache."""
