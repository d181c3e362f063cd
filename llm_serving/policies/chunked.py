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

    def _light_step(self, budget: int, now: float) -> ScheduledStep | None:
        """Returns a prefill step of at most ``budget`` tokens with prompts of light keys only, or None.

        If enough steps are in flight, returns a step only if the agent runs it before the queued steps.
        """
        if self._has_enough_steps() and not self._state.limits.runs_light_prefills_first:
            return None
        return self._mixed.light_prefill(budget, now)


class Chunked(MixedPolicy):
    """``chunked``: each step has all sequences that can decode, and chunks of prompts fill the rest of a token budget.

    So the time between tokens is at most the time of a step with ``chunk_tokens`` tokens. Steps run in the order in
    which they were scheduled, except prefill steps for light keys (``light_keys``).
    """

    def next_step(self, now: float) -> ScheduledStep | None:
        budget = self._state.limits.mixed_step_tokens
        step = self._light_step(budget, now)
        if step is not None or self._has_enough_steps():
            return step
        return self._mixed.mixed(budget, now, StepReason.BUDGET_SHARED)
