"""A device's costs learnt from steps that ran: non-negative least squares over what a step holds.

The time of a step is taken as a sum of terms that can only add time, each a count of the step times a coefficient:

    a step; a step with prompt tokens; tokens, tokens up to each of some knots and tokens beyond each (weights are read
    once, so tokens are cheap until arithmetic takes longer; a unit that multiplies 16 rows at a time, as AMX does, is
    dear for the first of them: the sum is any curve that rises, piecewise linear); sequences; rows sampled; keys read;
    pairs of a query and a position beyond those; blocks swapped, blocks copied; requests that came while it ran, whose
    way in takes time of the device's cores where it shares them (what they take is the host's, ``interrupt_s``)

Residuals are weighted by one over the time expected (by one over the measured one in the first round, which is biased
to short steps but not led astray by single long ones), so that a small step counts as much as a large one, and steps
that the machine held up (beyond ``OUTLIER`` times the fit) do not shape it. What all steps took, relative to the
fit, is kept as quantiles, with the share of it that lasts and for how long (see ``spread``): a simulation draws from
them, and so has the machine's mean and tails.

Algorithm: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

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
ROUNDS = 5
NUM_QUANTILES = 99
LEAST_STEPS = 50
LEAST_SUCH_STEPS = 10
TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step as it ran. ``seconds``: from when the device could begin it to when the next could begin."""

    work: StepWork
    seconds: float
    swapped_blocks: int = 0
    copied_blocks: int = 0
    arrivals: int = 0
    """Requests that came while it ran."""
    begin: float = 0.0
    """On the engine's clock, in seconds."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """Coefficients in seconds by term, with where they come from. Belongs to one model in one set of formats."""

    coefficients: dict[str, float]
    spread: Spread
    provenance: dict[str, Any] = field(default_factory=dict)
    host: HostModel = field(default_factory=HostModel)
    slowdown: Slowdown = field(default_factory=Slowdown)
    """What a step takes of the sum of its terms."""

    def slowed(self, by: Slowdown) -> StepFit:
        """On the same machine at a time when it is slower: the host's part, too, as all steps are."""
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
    """The counts of a step, in the order of ``TERMS``."""
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
    """Raises UsageError when there are too few steps to tell anything."""
    steps = [step for step in steps if step.seconds > 0.0]
    if len(steps) < LEAST_STEPS:
        raise UsageError(f"{len(steps)} steps with a time are recorded; a fit takes at least {LEAST_STEPS}")
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
    """Medians of the times relative to the fit, which single steps that the machine held up do not move. Few or many
    rows that hardly a step decoded are taken for as slow as all decode steps. Raises UsageError when there are too few
    steps."""
    steps = [step for step in steps if step.seconds > 0.0]
    decode = [step for step in steps if step.work.kind is StepKind.DECODE]
    prompts = [step for step in steps if step.work.kind is not StepKind.DECODE]
    if len(steps) < LEAST_STEPS:
        raise UsageError(f"{len(steps)} steps with a time are recorded; the machine's speed takes {LEAST_STEPS}")
    if len(prompts) < LEAST_SUCH_STEPS or not decode:
        raise UsageError(
            f"{len(decode)} decode steps and {len(prompts)} with prompts are recorded; the machine's speed takes one"
            f" and {LEAST_SUCH_STEPS}"
        )
    between = (FEW_ROWS + MANY_ROWS) / 2
    few = [step for step in decode if step.work.tokens < between]
    many = [step for step in decode if step.work.tokens > between]
    few, many = (those if len(those) >= LEAST_SUCH_STEPS else decode for those in (few, many))
    usual = float(np.median(fit.spread.quantiles))
    return Slowdown(*(_median_ratio(fit, those) / usual for those in (steps, few, many, prompts)))


def at_one_speed(fit: StepFit, loads: Sequence[Sequence[Sequence[MeasuredStep]]]) -> list[MeasuredStep]:
    """The steps of several runs of each of some loads, every load the same each time, as if the machine had been as
    fast in all runs of a load as in the median one. ``fit``: of all of them. A run without steps has no speed."""
    steps = []
    for runs in loads:
        ratios = [_median_ratio(fit, run) for run in runs if run]
        usual = float(np.median(ratios)) if ratios else 1.0
        for run, ratio in zip((run for run in runs if run), ratios, strict=True):
            steps += [replace(step, seconds=step.seconds * usual / ratio) for step in run]
    return steps


def _median_ratio(fit: StepFit, steps: Sequence[MeasuredStep]) -> float:
    """Of measured to fitted time."""
    device = FittedDevice(fit)
    return float(np.median([step.seconds / max(device.measured_seconds(step, fit.host), TOLERANCE) for step in steps]))


def _coefficients(counts: Array, seconds: Array) -> Array:
    """Returns the coefficients of at least 0 with which ``counts @ coefficients`` is closest to ``seconds``.

    Columns of ``counts`` may be zero or depend on each other.
    """
    scale = np.linalg.norm(counts, axis=0)
    scale[scale == 0.0] = 1.0
    solution: Array = nnls(counts / scale, seconds, maxiter=30 * len(scale))[0]
    return solution / scale


class FittedDevice:
    """A cost model from a fit."""

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
        """What a recorded step is expected to have taken, with what ``host`` says of the requests that came."""
        moves = self._slowdown.steps * (step.swapped_blocks * self._swap_s + step.copied_blocks * self._copy_s)
        return self.work_seconds(step.work) + moves + step.arrivals * host.interrupt_s

    def work_seconds(self, work: StepWork) -> float:
        """A step of ``work`` without moves."""
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
    """A file of ``StepFit.as_json``. Raises UsageError when it is none."""
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
