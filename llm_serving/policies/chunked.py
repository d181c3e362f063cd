"""Policy ``chunked``: one step may have both decoding sequences and chunks of prompts."""

from __future__ import annotations

from llm_serving.policies.base import SchedulingPolicy
from llm_serving.scheduler.mixed import MixedComposer
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.state import SchedulerState


class MixedPolicy(SchedulingPolicy):
    """Base class of the policies that use mixed steps."""

    def __init__(self, state: SchedulerState, composer: MixedComposer) -> None:
        super().__init__(state, composer)
        self._mixed = composer

    def _has_enough_steps(self) -> bool:
        """Returns True if more than ``decode_steps_ahead`` steps are in flight."""
        return self._state.in_flight.num_compute_steps > self._state.limits.decode_steps_ahead


class Chunked(MixedPolicy):
    """``chunked``: each step has all sequences that can decode, and chunks of prompts fill the rest of a token budget.

    So the time between tokens is at most the time of a step with ``chunk_tokens`` tokens. Steps run in the order in
    which they were scheduled.
    """

    def next_step(self, now: float) -> ScheduledStep | None:
        limits = self._state.limits
        if self._has_enough_steps():
            return None
        step = self._mixed.light_prefill(limits.mixed_step_tokens, now)
        return step or self._mixed.mixed(limits.mixed_step_tokens, now, StepReason.BUDGET_SHARED)
