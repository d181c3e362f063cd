"""How much slower a machine is than when it was fitted, for each kind of step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from llm_serving.scheduler.output import StepKind
from performance.simulation.work import StepWork

__all__ = ["FEW_ROWS", "MANY_ROWS", "Slowdown"]

FEW_ROWS, MANY_ROWS = 4, 12
"""Up to the one a decode step is mostly reading weights, from the other on arithmetic counts as much."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long steps took as the fit says: all, those that decode few or many rows, and those with prompt
    tokens. A machine is seldom as slow at reading memory, of which decoding few rows is most, as at arithmetic."""

    steps: float = 1.0
    few_rows: float = 1.0
    many_rows: float = 1.0
    prompts: float = 1.0

    def of(self, work: StepWork) -> float:
        """That of a step: between few and many rows what lies between."""
        if work.kind is not StepKind.DECODE:
            return self.prompts
        many = min(1.0, max(0.0, (work.tokens - FEW_ROWS) / (MANY_ROWS - FEW_ROWS)))
        return self.few_rows + many * (self.many_rows - self.few_rows)

    def times(self, other: Slowdown) -> Slowdown:
        """Of a machine that is slower by ``other`` yet."""
        return Slowdown(*(mine * more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    @staticmethod
    def of_all(each: Sequence[Slowdown], middle: Callable[[Sequence[float]], float]) -> Slowdown:
        """The ``middle`` (mean, median) of several."""
        return Slowdown(*(middle(values) for values in zip(*(astuple(one) for one in each), strict=True)))
