"""What ``prefill_first`` and ``fcfs`` have in common: a prefill step as soon as there can be one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.policies.base import StepComposers
from llm_serving.scheduler.state import SchedulerState

__all__ = ["PromptsFirst", "prefill_streak_limit"]


class PromptsFirst(ABC):
    """A prefill step as soon as the request at the head of the queue fits, a decode step over all rows that can
    advance; after ``prefill_streak_limit`` prefill steps that made running rows wait, a decode goes first."""

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None:
        self._state = state
        self._prefills = composers.prefills
        self._decodes = composers.decodes
        self._streak = 0
        self._streak_limit = prefill_streak_limit(state.limits.max_num_seqs, state.limits.prefill_batch_size)

    def next_step(self, now: float) -> ScheduledStep | None:
        if self._streak < self._streak_limit:
            return self._prefill(now) or self._decode(now, StepReason.ROWS_READY)
        step = self._decode(now, StepReason.ROWS_OVERDUE)
        if step is None and not self._state.in_flight.num_steps:
            step = self._prefill(now)
        return step

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        """After a decode step prefills may go ahead again."""
        if step.kind is StepKind.DECODE:
            self._streak = 0

    def reset(self) -> None:
        self._streak = 0

    @abstractmethod
    def _decode_is_due(self) -> bool:
        """Whether it is time to put the next decode step together."""

    def _prefill(self, now: float) -> ScheduledStep | None:
        step = self._prefills.compose(now, StepReason.PROMPT_READY)
        if step is not None:
            self._streak += self._keeps_rows_waiting(step)
        return step

    def _decode(self, now: float, reason: StepReason) -> ScheduledStep | None:
        if not self._state.running or not self._decode_is_due():
            return None
        return self._decodes.compose(now, reason)

    def _keeps_rows_waiting(self, prefill: ScheduledStep) -> bool:
        """Whether others would decode if these were not prefilled."""
        return self._state.in_flight.num_decode_steps > 0 or any(
            sequence.wants_token and sequence.request not in prefill.requests for sequence in self._state.running
        )


def prefill_streak_limit(max_num_seqs: int, prefill_batch_size: int) -> int:
    """Prefill steps that may be scheduled while running requests wait to decode: enough to fill every row once.

    A burst runs as the policy promises, and a stream of one-token requests cannot stop the others for good.
    """
    return -(-max_num_seqs // prefill_batch_size)
