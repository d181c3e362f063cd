"""``chunked``: every step holds all rows that can decode, and prompts fill the rest of a token budget.

Stall-free batching (Sarathi-Serve, Agrawal et al. 2024): no row ever waits for a whole prompt, and the time between
tokens is bounded by the time of a step of ``chunk_tokens`` tokens. Steps run in the order they were scheduled.
"""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepReason, StepResult
from llm_serving.scheduler.policies.base import StepComposers
from llm_serving.scheduler.state import SchedulerState

__all__ = ["Chunked"]


class Chunked:
    """A step is put together when no more than ``decode_steps_ahead`` are unanswered."""

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None:
        self._state = state
        self._mixed = composers.mixed

    def next_step(self, now: float) -> ScheduledStep | None:
        limits = self._state.limits
        if self._state.in_flight.num_compute_steps > limits.decode_steps_ahead:
            return None
        return self._mixed.compose(limits.mixed_step_tokens, now, StepReason.BUDGET_SHARED)

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        pass

    def reset(self) -> None:
        pass
