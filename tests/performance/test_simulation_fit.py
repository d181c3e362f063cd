"""Tests the fit of step times.

The fit is exact if its terms describe the device. Otherwise, its error is bounded.
"""

import json
import random
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind
from performance.program import UsageError, write_json
from performance.simulation.fit import (
    TERMS,
    FittedDevice,
    MeasuredStep,
    at_one_speed,
    fit_steps,
    read_fit,
    slowdown,
    terms_of,
)
from performance.simulation.slowdown import Slowdown
from performance.simulation.work import StepWork

TRUTH = {
    "step": 2e-3,
    "prompt_step": 1e-3,
    "tokens": 1e-4,
    "tokens_beyond_16": 3e-4,
    "samples": 2e-5,
    "context": 1e-6,
    "more_pairs": 1e-8,
}


def some_steps(count: int, noise: float = 0.0) -> list[MeasuredStep]:
    generator = random.Random(5)
    steps = []
    for _ in range(count):
        rows = generator.randint(1, 128)
        context = rows * generator.randint(1, 500)
        work = StepWork(StepKind.DECODE, rows, rows, rows, context, context)
        if generator.random() < 0.3:
            rows = generator.randint(1, 8)
            tokens, context = 60 * rows, 60 * rows
            work = StepWork(StepKind.PREFILL, tokens, rows, generator.randint(0, rows), context, 1830 * rows)
        seconds = sum(TRUTH.get(name, 0.0) * count for name, count in zip(TERMS, terms_of(work), strict=True))
        steps.append(MeasuredStep(work, seconds * (1.0 + noise * (2.0 * generator.random() - 1.0))))
    return steps


def test_the_fit_finds_the_delay_by_arriving_requests() -> None:
    steps = [
        replace(step, seconds=step.seconds + 1.5e-3 * (index % 3), arrivals=index % 3)
        for index, step in enumerate(some_steps(300))
    ]
    fit = fit_steps(steps)
    assert fit.host.interrupt_s == pytest.approx(1.5e-3, rel=1e-3)
    assert fit.provenance["median_error"] < 1e-3
    assert fit_steps(some_steps(300)).host.interrupt_s == 0.0


def test_a_slower_machine_is_measured_and_the_fit_adapts() -> None:
    """The planted slowdown is largest for decode steps of few rows and smallest for steps with prompts.

    Other programs that use the memory bandwidth cause this pattern.
    """
    fit = fit_steps(some_steps(400, noise=0.1))
    planted = Slowdown(1.0, 1.4, 1.25, 1.1)
    slow = [replace(step, seconds=planted.of(step.work) * step.seconds) for step in some_steps(900, noise=0.1)]
    slow[0] = replace(slow[0], seconds=100.0)  # a delayed step
    by = slowdown(fit, slow)
    assert (by.many_rows, by.prompts) == pytest.approx((1.25, 1.1), rel=0.01)
    assert by.few_rows == pytest.approx(1.4, rel=0.03)
    assert by.prompts < by.steps <= by.many_rows
    slowed = fit.slowed(by)
    assert astuple(slowdown(slowed, slow)) == pytest.approx((1.0, 1.0, 1.0, 1.0), rel=0.03)
    assert slowed.host.accept_s == by.steps * fit.host.accept_s
    with pytest.raises(UsageError, match="49 steps"):
        slowdown(fit, slow[:49])
    with pytest.raises(UsageError, match="0 with prompts"):
        slowdown(fit, [step for step in slow if step.work.kind is StepKind.DECODE])
    only_many = [step for step in slow if step.work.kind is not StepKind.DECODE or step.work.tokens > 8]
    assert slowdown(fit, only_many).few_rows == pytest.approx(1.25, rel=0.01)


def test_the_slowdown_is_interpolated_between_few_and_many_rows() -> None:
    by = Slowdown(9.0, 1.2, 1.4, 2.0)
    rows = (1, 4, 6, 8, 12, 500)
    steps = [StepWork(StepKind.DECODE, count, count, count, count, count) for count in rows]
    assert [by.of(work) for work in steps] == pytest.approx([1.2, 1.2, 1.25, 1.3, 1.4, 1.4])
    assert by.of(StepWork(StepKind.MIXED, 5)) == by.of(StepWork(StepKind.PREFILL, 500)) == 2.0
    assert by.times(Slowdown(1.0, 2.0, 3.0, 0.5)) == Slowdown(9.0, 2.4, by.many_rows * 3.0, 1.0)


def test_a_slowed_fit_is_written_and_read(tmp_path: Path) -> None:
    fit = fit_steps(some_steps(400)).slowed(Slowdown(1.2, 1.3, 1.25, 1.1))
    (tmp_path / "fit.json").write_text(json.dumps(fit.as_json()))
    again = read_fit(tmp_path / "fit.json")
    assert again.slowdown == fit.slowdown == Slowdown(1.2, 1.3, 1.25, 1.1)
    for step in some_steps(50):
        assert FittedDevice(again).work_seconds(step.work) == FittedDevice(fit).work_seconds(step.work)


def test_the_fit_finds_the_coefficients_of_steps_without_noise() -> None:
    steps = some_steps(400)
    fit = fit_steps(steps, {"model": "m"})
    device = FittedDevice(fit)
    assert max(abs(device.work_seconds(step.work) / step.seconds - 1.0) for step in steps) < 1e-6
    assert fit.provenance == {"model": "m", "steps": 400, "held_up": 0, "median_error": pytest.approx(0.0, abs=1e-6)}
    assert min(fit.spread.quantiles) == pytest.approx(max(fit.spread.quantiles))


def test_the_fit_follows_a_curve_of_tiles() -> None:
    """``curve`` maps the number of decode rows of a step to its measured time in milliseconds.

    The kernel computes rows in tiles of 6 and of 13, so the curve is not a straight line.
    """
    curve = {6: 12.6, 8: 12.9, 9: 13.4, 10: 13.4, 11: 14.0, 12: 14.3, 13: 15.5, 14: 16.6, 15: 17.1, 16: 18.3, 20: 23.1}
    steps = [
        MeasuredStep(StepWork(StepKind.DECODE, rows, rows, rows, 0, 0), milliseconds / 1e3)
        for rows, milliseconds in curve.items()
        for _ in range(20)
    ]
    device = FittedDevice(fit_steps(steps))
    assert max(abs(device.work_seconds(step.work) / step.seconds - 1.0) for step in steps) < 0.025


def test_noise_becomes_spread_and_the_mean_is_preserved() -> None:
    steps = some_steps(2000, noise=0.2)
    fit = fit_steps(steps)
    device, quantiles = FittedDevice(fit), fit.spread.quantiles
    mean = sum(quantiles) / len(quantiles)
    predicted = mean * sum(device.work_seconds(step.work) for step in steps)
    assert predicted == pytest.approx(sum(step.seconds for step in steps), rel=2e-3)
    assert quantiles[0] / mean == pytest.approx(0.8, abs=0.02)
    assert quantiles[-1] / mean == pytest.approx(1.2, abs=0.02)


def test_delayed_steps_do_not_distort_the_fit() -> None:
    steps = some_steps(500)
    held = [MeasuredStep(step.work, 50.0 * step.seconds) for step in steps[:5]]
    fit = fit_steps([*held, *steps[5:]])
    assert fit.provenance["held_up"] == 5
    middle = fit.spread.quantiles[len(fit.spread.quantiles) // 2]
    device = FittedDevice(fit)
    typical = [device.work_seconds(step.work) * middle / step.seconds for step in steps]
    assert max(abs(ratio - 1.0) for ratio in typical) < 0.01


def test_a_step_with_moves_and_a_step_of_moves_only() -> None:
    steps = some_steps(300)
    moves = [
        MeasuredStep(StepWork(StepKind.MOVE), 2e-3 + 1e-3 * out + 5e-4 * copies, out, copies)
        for out in range(8)
        for copies in range(8)
    ]
    device = FittedDevice(fit_steps([*steps, *moves]))
    out, copy = BlockMove(MoveKind.SWAP_OUT, 1, 1), BlockMove(MoveKind.COPY, 1, 2)
    assert device.seconds(ScheduledStep(0, StepKind.MOVE, moves=[out, out, copy])) == pytest.approx(4.5e-3, rel=1e-6)


def test_too_few_steps_are_rejected() -> None:
    with pytest.raises(UsageError, match="49 steps with a time are recorded; a fit needs at least 50"):
        fit_steps(some_steps(49))


def test_a_fit_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    steps = [
        replace(step, seconds=step.seconds * (1.0 + 0.1 * (index // 20 % 2)), begin=0.01 * index)
        for index, step in enumerate(some_steps(300, noise=0.01))
    ]
    fit = fit_steps(steps, {"model": "m"})
    write_json(path, fit.as_json())
    again = read_fit(path)
    assert again.coefficients == fit.coefficients
    assert again.provenance == fit.provenance
    assert again.host == fit.host
    lasting = (fit.spread.lasting_share, fit.spread.lasting_s)
    assert lasting[0] > 0.5
    assert (again.spread.lasting_share, again.spread.lasting_s) == lasting
    path.write_text('{"coefficients": {}}')
    with pytest.raises(UsageError, match="not a fit of the simulator"):
        read_fit(path)


def test_runs_of_a_load_are_scaled_to_one_speed() -> None:
    """In one of three runs, the machine had half of its speed. The scaled times are those of one constant speed."""
    steps = some_steps(120)
    slow = [replace(step, seconds=2.0 * step.seconds) for step in steps]
    runs = [steps[:60], steps[:60], slow[:60]]
    others = [slow[60:], steps[60:], [], steps[60:]]
    together = [step for run in (*runs, *others) for step in run]
    even = at_one_speed(fit_steps(together), [runs, others])
    assert [step.seconds for step in even] == pytest.approx([step.seconds for step in steps[:60] * 3 + steps[60:] * 3])
