"""The base class of the scheduling policies, which decide what kind of step runs next."""

from __future__ import annotations

from abc import ABC, abstractmethod

from llm_serving.scheduler.composer import StepComposer
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState


class SchedulingPolicy(Stateful, ABC):
    """Chooses the next step.

    The scheduler calls ``next_step`` whenever a step may be sent, and ``step_completed`` after each step.
    """

    def __init__(self, state: SchedulerState, composer: StepComposer) -> None:
        self._state = state
        self._composer = composer

    @abstractmethod
    def next_step(self, now: float) -> ScheduledStep | None:
        """Returns the next step. Returns None if there is nothing to run or if enough steps are in flight."""

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        """Records that a step has completed, failed or been dropped."""

    def reset(self) -> None:
        """Forgets the steps in flight, because the agent was lost."""
