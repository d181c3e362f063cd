"""Describes how much slower a machine is now than when the simulator was fitted to it, for each kind of step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from llm_serving.scheduler.output import StepKind
from performance.simulation.work import StepWork

__all__ = ["FEW_ROWS", "MANY_ROWS", "Slowdown"]

FEW_ROWS, MANY_ROWS = 4, 12
"""Numbers of sequences in a decode step. Up to FEW_ROWS sequences, a step spends most of its time reading weights. From
MANY_ROWS sequences on, it spends most of its time on arithmetic.
"""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Measured step time divided by fitted step time: of all steps, and of three kinds of steps.

    The kinds are decode steps of few rows, decode steps of many rows, and steps with prompt tokens. Slow memory mostly
    affects decode steps of few rows. Slow arithmetic mostly affects the other two kinds.
    """

    steps: float = 1.0
    few_rows: float = 1.0
    many_rows: float = 1.0
    prompts: float = 1.0

    def of(self, work: StepWork) -> float:
        """Returns the factor for a step. For decode steps between few and many rows, the factor is interpolated."""
        if work.kind is not StepKind.DECODE:
            return self.prompts
        many = min(1.0, max(0.0, (work.tokens - FEW_ROWS) / (MANY_ROWS - FEW_ROWS)))
        return self.few_rows + many * (self.many_rows - self.few_rows)

    def times(self, other: Slowdown) -> Slowdown:
        """Combines two slowdowns by multiplying their factors."""
        return Slowdown(*(mine * more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    @staticmethod
    def of_all(each: Sequence[Slowdown], middle: Callable[[Sequence[float]], float]) -> Slowdown:
        """Combines several slowdowns: applies ``middle``, for example the mean or the median, to each factor."""
        return Slowdown(*(middle(values) for values in zip(*(astuple(one) for one in each), strict=True)))
