"""Fits a formula for the time of a step to measured steps, by non-negative least squares.

The time of a step is a sum of terms. A term is a count, which follows from the step, times a coefficient in seconds,
which the fit finds. Coefficients cannot be negative. The counts are:

    - 1 for every step; 1 for a step with prompt tokens, otherwise 0
    - the number of tokens; for each number k in ``KNOTS``: min(tokens, k), and max(0, tokens - k)
    - sequences; sampled rows; keys that attention reads; query-key pairs minus the keys that attention reads
    - swapped blocks; copied blocks
    - requests that arrived during the step (this coefficient is the host's ``interrupt_s``)

The terms of the tokens can add up to any increasing, piecewise linear curve. A straight line would not fit: weights are
read only once per step, so additional tokens cost little until the arithmetic takes longer than reading. Also, a
processor unit that multiplies 16 rows at a time, such as AMX, takes as long for one row as for 16.

The fit is repeated several times. Residuals are divided by the time that the previous fit expects, so that a short step
counts as much as a long one. The first fit divides them by the measured time. This favours short steps, but the fit is
robust against single steps that were delayed. Later fits leave out steps that took more than ``OUTLIER`` times the
expected time.

Measured times deviate from the fitted times. The ratios of measured to fitted time are stored as quantiles over all
steps. The fit also stores which fraction of the deviation lasts longer than a step, and how long this part lasts
(``spread``). A simulation draws its deviations from these data, so that its mean and tail latencies are those of the
machine.

Algorithm: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23 (``scipy.optimize.nnls``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from llm_serving.scheduler.output import MoveKind, ScheduledStep, StepKind
from performance.program import UsageError
from performance.simulation.host import HostModel
from performance.simulation.slowdown import FEW_ROWS, MANY_ROWS, Slowdown
from performance.simulation.spread import Spread, lasting_part
from performance.simulation.work import StepWork, work_of

__all__ = ["TERMS", "FittedDevice", "MeasuredStep", "StepFit", "at_one_speed", "fit_steps", "read_fit", "slowdown"]

Array = npt.NDArray[np.float64]
KNOTS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64, 128, 256)
TERMS = (
    "step",
    "prompt_step",
    "tokens",
    *(f"tokens_up_to_{knot}" for knot in KNOTS),
    *(f"tokens_beyond_{knot}" for knot in KNOTS),
    "sequences",
    "samples",
    "context",
    "more_pairs",
    "swapped_blocks",
    "copied_blocks",
)
OUTLIER = 3.0
"""Later fits leave out steps that took more than this multiple of the predicted time."""
ROUNDS = 5
"""Number of consecutive fits. Each later fit takes its weights from the times that the fit before it predicts."""
NUM_QUANTILES = 99
"""Number of quantiles of the ratio between measured and predicted times."""
MIN_STEPS = 50
"""Minimum number of steps with a time, for a fit and for a measurement of the speed."""
MIN_STEPS_OF_KIND = 10
"""Minimum number of steps of a kind (such as steps with prompts) for a slowdown of this kind."""
TOLERANCE = 1e-10
"""Smallest predicted time of a step in seconds, so that ratios are finite."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A completed step. ``seconds`` is the time for which the step occupied the device."""

    work: StepWork
    seconds: float
    swapped_blocks: int = 0
    copied_blocks: int = 0
    arrivals: int = 0
    """Number of requests that arrived during the step."""
    begin: float = 0.0
    """Start of the step on the engine's clock, in seconds."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """The coefficients of a fit by term, in seconds, and their provenance. Valid for one model and its number formats.
    """

    coefficients: dict[str, float]
    spread: Spread
    provenance: dict[str, Any] = field(default_factory=dict)
    host: HostModel = field(default_factory=HostModel)
    slowdown: Slowdown = field(default_factory=Slowdown)
    """Factors by which steps take longer now than when the coefficients were measured."""

    def slowed(self, by: Slowdown) -> StepFit:
        """Returns this fit for a period in which the machine is slower: steps take longer by the factors ``by``.

        The times of the server process are multiplied by ``by.steps``.
        """
        host = HostModel(**{name: by.steps * seconds for name, seconds in asdict(self.host).items()})
        return replace(self, slowdown=self.slowdown.times(by), host=host)

    def as_json(self) -> dict[str, Any]:
        return {
            "provenance": self.provenance,
            "coefficients": self.coefficients,
            "spread": [round(value, 5) for value in self.spread.quantiles],
            "lasting_share": self.spread.lasting_share,
            "lasting_s": self.spread.lasting_s,
            "host": asdict(self.host),
            "slowdown": asdict(self.slowdown),
        }


def terms_of(work: StepWork, swapped: int = 0, copied: int = 0) -> list[float]:
    """Returns the counts of a step, for example its number of tokens, in the order of ``TERMS``."""
    tokens = work.tokens
    return [
        1.0,
        float(work.kind in (StepKind.PREFILL, StepKind.MIXED)),
        tokens,
        *(min(tokens, knot) for knot in KNOTS),
        *(max(0, tokens - knot) for knot in KNOTS),
        work.sequences,
        work.samples,
        work.context,
        work.pairs - work.context,
        swapped,
        copied,
    ]


def fit_steps(steps: Sequence[MeasuredStep], provenance: dict[str, Any] | None = None) -> StepFit:
    """Returns the coefficients that fit the measured times of steps best. Raises UsageError if there are too few steps.
    """
    steps = [step for step in steps if step.seconds > 0.0]
    if len(steps) < MIN_STEPS:
        raise UsageError(f"{len(steps)} steps with a time are recorded; a fit needs at least {MIN_STEPS}")
    counts = np.array(
        [[*terms_of(step.work, step.swapped_blocks, step.copied_blocks), step.arrivals] for step in steps], float
    )
    seconds = np.array([step.seconds for step in steps])
    kept, expected = np.ones(len(steps), bool), seconds
    for _ in range(ROUNDS):
        weights = 1.0 / expected[kept]
        coefficients = _coefficients(counts[kept] * weights[:, None], seconds[kept] * weights)
        expected = predicted = np.maximum(counts @ coefficients, TOLERANCE)
        kept = seconds <= OUTLIER * predicted
    ratio = seconds / predicted
    quantiles = np.quantile(ratio, (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES)
    return StepFit(
        {name: float(value) for name, value in zip(TERMS, coefficients[:-1], strict=True)},
        Spread([float(value) for value in quantiles], *lasting_part(ratio, [step.begin for step in steps])),
        (provenance or {})
        | {
            "steps": len(steps),
            "held_up": int((~kept).sum()),
            "median_error": float(np.median(np.abs(ratio - 1.0))),
        },
        HostModel(interrupt_s=float(coefficients[-1])),
    )


def slowdown(fit: StepFit, steps: Sequence[MeasuredStep]) -> Slowdown:
    """Returns the median ratios of measured to fitted time, over all steps and over each kind of step.

    A median ignores single delayed steps. The kinds are those of ``Slowdown``. If there are too few decode steps with
    few (or many) rows, the ratio of all decode steps is used instead. Raises UsageError if there are too few steps.
    """
    steps = [step for step in steps if step.seconds > 0.0]
    decode = [step for step in steps if step.work.kind is StepKind.DECODE]
    prompts = [step for step in steps if step.work.kind is not StepKind.DECODE]
    if len(steps) < MIN_STEPS:
        raise UsageError(f"{len(steps)} steps with a time are recorded; measuring the speed needs {MIN_STEPS}")
    if len(prompts) < MIN_STEPS_OF_KIND or not decode:
        raise UsageError(
            f"{len(decode)} decode steps and {len(prompts)} with prompts are recorded; measuring the speed needs 1"
            f" and {MIN_STEPS_OF_KIND}"
        )
    between = (FEW_ROWS + MANY_ROWS) / 2
    few = [step for step in decode if step.work.tokens < between]
    many = [step for step in decode if step.work.tokens > between]
    few, many = (those if len(those) >= MIN_STEPS_OF_KIND else decode for those in (few, many))
    usual = float(np.median(fit.spread.quantiles))
    return Slowdown(*(_median_ratio(fit, those) / usual for those in (steps, few, many, prompts)))


def at_one_speed(fit: StepFit, loads: Sequence[Sequence[Sequence[MeasuredStep]]]) -> list[MeasuredStep]:
    """Returns the steps of repeated runs, scaled as if the machine had always had the same speed.

    ``loads`` has, for each load, the steps of each run of this load. The runs of a load differ only by the machine's
    speed. The steps of each run are scaled to the median speed of its load. ``fit`` is the fit of all steps together.
    """
    steps = []
    for runs in loads:
        ratios = [_median_ratio(fit, run) for run in runs if run]
        usual = float(np.median(ratios)) if ratios else 1.0
        for run, ratio in zip((run for run in runs if run), ratios, strict=True):
            steps += [replace(step, seconds=step.seconds * usual / ratio) for step in run]
    return steps


def _median_ratio(fit: StepFit, steps: Sequence[MeasuredStep]) -> float:
    """Returns the median of measured time divided by fitted time."""
    device = FittedDevice(fit)
    return float(np.median([step.seconds / max(device.measured_seconds(step, fit.host), TOLERANCE) for step in steps]))


def _coefficients(counts: Array, seconds: Array) -> Array:
    """Solves ``counts @ coefficients = seconds`` by least squares, with coefficients that are not negative.

    Columns of ``counts`` may be zero or linearly dependent.
    """
    from scipy.optimize import nnls  # imported late: most programs that import this module fit nothing

    scale = np.linalg.norm(counts, axis=0)
    scale[scale == 0.0] = 1.0
    solution: Array = nnls(counts / scale, seconds, maxiter=30 * len(scale))[0]
    return solution / scale


class FittedDevice:
    """Calculates the time of a step from the coefficients of a fit."""

    def __init__(self, fit: StepFit) -> None:
        self.name = str(fit.provenance.get("name", "fitted"))
        seconds = fit.coefficients
        self._step_s, self._prompt_s, self._token_s = seconds["step"], seconds["prompt_step"], seconds["tokens"]
        self._curve = [(knot, seconds[f"tokens_up_to_{knot}"], seconds[f"tokens_beyond_{knot}"]) for knot in KNOTS]
        self._sequence_s, self._sample_s = seconds["sequences"], seconds["samples"]
        self._context_s, self._pair_s = seconds["context"], seconds["more_pairs"]
        self._swap_s, self._copy_s = seconds["swapped_blocks"], seconds["copied_blocks"]
        self._slowdown = fit.slowdown

    def seconds(self, step: ScheduledStep) -> float:
        copies = sum(move.kind is MoveKind.COPY for move in step.moves)
        moves = self._slowdown.steps * (copies * self._copy_s + (len(step.moves) - copies) * self._swap_s)
        if not step.rows:
            return self._slowdown.steps * self._step_s + moves
        return moves + self.work_seconds(work_of(step))

    def measured_seconds(self, step: MeasuredStep, host: HostModel) -> float:
        """Returns the seconds that the fit predicts for a recorded step, including the delay by requests that arrived
        during the step.
        """
        moves = self._slowdown.steps * (step.swapped_blocks * self._swap_s + step.copied_blocks * self._copy_s)
        return self.work_seconds(step.work) + moves + step.arrivals * host.interrupt_s

    def work_seconds(self, work: StepWork) -> float:
        """Returns the seconds of a step without its block moves."""
        tokens = work.tokens
        seconds = self._step_s + tokens * self._token_s + work.sequences * self._sequence_s
        if work.kind is not StepKind.DECODE:
            seconds += self._prompt_s
        for knot, up_to_s, beyond_s in self._curve:
            seconds += tokens * up_to_s if tokens <= knot else knot * up_to_s + (tokens - knot) * beyond_s
        seconds += (
            work.samples * self._sample_s + work.context * self._context_s + (work.pairs - work.context) * self._pair_s
        )
        return self._slowdown.of(work) * seconds


def read_fit(path: Path) -> StepFit:
    """Reads the JSON file of a ``StepFit``. Raises UsageError if the file has other content."""
    try:
        content = msgspec.json.decode(path.read_bytes())
        return StepFit(
            {name: float(content["coefficients"][name]) for name in TERMS},
            Spread(
                [float(value) for value in content["spread"]],
                float(content["lasting_share"]),
                float(content["lasting_s"]),
            ),
            dict(content["provenance"]),
            HostModel(**content["host"]),
            Slowdown(**{name: float(content["slowdown"][name]) for name in asdict(Slowdown())}),
        )
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a fit of the simulator: {error!r}") from error
