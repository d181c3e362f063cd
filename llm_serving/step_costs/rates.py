"""The mean time of a computed token or of a moved block, which a scheduler learns from completed steps."""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.snapshot import Stateful

_KEEP = 1 - 1 / 32
"""Each new step multiplies the weights of earlier steps by this factor. About the last 32 steps count."""


class Rate(Stateful):
    """Mean seconds per unit: a computed token or a moved block. The latest steps have the largest weight."""

    STATE = ("_seconds", "_units")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def note(self, seconds: float, units: int) -> None:
        """Adds a step that computed or moved ``units`` units in ``seconds``."""
        self._seconds = self._seconds * _KEEP + seconds
        self._units = self._units * _KEEP + units

    @property
    def seconds_per_unit(self) -> float | None:
        """Mean seconds per computed token or moved block. None before the first measurement."""
        return self._seconds / self._units if self._units else None


def learn_from_step(step: ScheduledStep, result: StepResult, prefill: Rate, move: Rate) -> None:
    """Adds the time of a completed step to ``prefill`` if the step computed prompts, or to ``move`` if it moved blocks.

    Ignores decode steps, and steps that failed or never ran.
    """
    seconds = result.graph_us / 1e6
    if result.aborted or result.error is not None or seconds <= 0.0:
        return
    if step.kind is StepKind.PREFILL or step.kind is StepKind.MIXED:
        prefill.note(seconds, step.num_tokens)
    elif step.kind is StepKind.MOVE:
        move.note(seconds, len(step.moves))
