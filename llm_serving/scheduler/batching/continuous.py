"""Continuous batching (Orca, Yu et al. 2022): a request joins at any step and leaves with its last token."""

from __future__ import annotations

from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState

__all__ = ["ContinuousBatching"]


class ContinuousBatching:
    """Whoever is first in line may start. With ``batch_waiting_time``, prompts wait so long for company, unless they
    fill a step or every free row."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        if beside or self._fills_a_step():
            return True
        deadline = sequence.request.arrival_time + self._state.limits.batch_waiting_time
        if deadline <= now:
            return True
        self._state.wake_at(deadline)
        return False

    def _fills_a_step(self) -> bool:
        limits, waiting = self._state.limits, self._state.waiting
        return (
            len(waiting) >= min(limits.prefill_batch_size, self._state.running.num_free_rows)
            or waiting.num_tokens >= limits.max_num_batched_tokens
        )

    def started(self, sequence: Sequence) -> None:
        pass

    def held_up(self) -> None:
        pass
