"""Scheduling policies: which kind of step comes next (``scheduler_config.policy``).

All policies batch continuously and admit in the order of the queue; they differ in what goes first, prompts or rows
that decode, and so in who waits. What they may not differ in is a single token of any answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llm_serving.scheduler.decode_steps import DecodeComposer
from llm_serving.scheduler.mixed_steps import MixedComposer
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.scheduler.prefill_steps import PrefillComposer
from llm_serving.scheduler.state import SchedulerState

__all__ = ["SchedulingPolicy", "StepComposers"]


@dataclass(frozen=True, slots=True)
class StepComposers:
    """What a policy chooses from."""

    prefills: PrefillComposer
    decodes: DecodeComposer
    mixed: MixedComposer


class SchedulingPolicy(Protocol):
    """Asked for a step whenever one may be sent, told of every answer."""

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None: ...

    def next_step(self, now: float) -> ScheduledStep | None:
        """The step to send now, or None: there is nothing to run, or enough is in flight."""

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        """A step was answered; it may have failed, or been dropped before it began."""

    def reset(self) -> None:
        """The agent was lost: nothing runs any more."""
