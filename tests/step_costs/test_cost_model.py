"""Tests the learnt cost of a step. It is exact for steps that follow the model, and plausible for other steps."""

from __future__ import annotations

import random

import pytest

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.step_costs.cost_model import StepCostModel

BASE, ROW, CONTEXT, PROMPT = 0.004, 0.0002, 1e-7, 0.00005


def make_step(rows: list[int], prompt_tokens: int) -> ScheduledStep:
    """Returns a step with a prompt of ``prompt_tokens``, and with a decoding sequence for each context length in
    ``rows``.
    """
    kind = StepKind.DECODE if not prompt_tokens else StepKind.MIXED if rows else StepKind.PREFILL
    starts, lens = list(rows), [1] * len(rows)
    if prompt_tokens:
        starts, lens = [*starts, 0], [*lens, prompt_tokens]
    size = len(lens)
    return ScheduledStep(0, kind, rows=list(range(size)), token_ids=[2] * sum(lens), query_lens=lens, starts=starts)


def answer(step: ScheduledStep, seconds: float) -> StepResult:
    return StepResult(step.seq, graph_us=round(seconds * 1e6 * 0.75), sample_us=round(seconds * 1e6 * 0.25))


def seconds(rows: list[int], prompt_tokens: int) -> float:
    return BASE + ROW * len(rows) + CONTEXT * sum(rows) + PROMPT * prompt_tokens


def trained(rng: random.Random, steps: int, noise: float = 0.0) -> StepCostModel:
    model = StepCostModel()
    for _ in range(steps):
        rows = [rng.randrange(1, 3000) for _ in range(rng.randrange(0, 64))]
        prompt_tokens = rng.choice([0, 0, 0, 16, 200, 512]) if rows else 300
        step = make_step(rows, prompt_tokens)
        model.learn(step, answer(step, seconds(rows, prompt_tokens) * (1 + noise * rng.uniform(-1, 1))))
    return model


def test_the_model_is_unknown_before_the_first_steps() -> None:
    assert not StepCostModel().is_known


def test_the_model_finds_the_coefficients_of_steps_that_follow_it() -> None:
    model = trained(random.Random(1), 400)
    assert model.is_known
    for rows, prompt_tokens in (([100] * 32, 0), ([2000] * 8, 0), ([500] * 16, 256), ([], 512)):
        predicted = model.seconds(len(rows), sum(rows), prompt_tokens)
        assert predicted == pytest.approx(seconds(rows, prompt_tokens), rel=0.02)


def test_the_model_tolerates_varying_steps() -> None:
    model = trained(random.Random(2), 400, noise=0.2)
    assert model.seconds(32, 32 * 500, 128) == pytest.approx(seconds([500] * 32, 128), rel=0.1)


def test_the_model_returns_how_many_prompt_tokens_fit() -> None:
    model = trained(random.Random(3), 400)
    assert model.prompt_tokens_within(0.02, 16, 16 * 500) == pytest.approx(
        (0.02 - seconds([500] * 16, 0)) / PROMPT, rel=0.05
    )
    assert model.prompt_tokens_within(0.005, 64, 64 * 500) < 0


def test_no_coefficient_is_negative() -> None:
    rng, model = random.Random(4), StepCostModel()
    for _ in range(500):
        step = make_step([rng.randrange(1, 3000)] * rng.randrange(1, 64), rng.choice([0, 100]))
        model.learn(step, answer(step, rng.uniform(0.001, 0.1)))
        assert min(model.base_s, model.sequence_s, model.context_s, model.prompt_token_s) >= 0.0


def test_the_model_follows_a_device_that_becomes_slower() -> None:
    rng, model = random.Random(5), StepCostModel()
    for place in range(2000):
        rows = [rng.randrange(1, 1000) for _ in range(rng.randrange(1, 64))]
        step = make_step(rows, rng.choice([0, 64]))
        model.learn(step, answer(step, seconds(rows, step.num_tokens - len(rows)) * (1 if place < 400 else 2)))
    assert model.seconds(32, 16_000, 64) == pytest.approx(2 * seconds([500] * 32, 64), rel=0.05)


def test_failed_steps_and_move_steps_are_ignored() -> None:
    model = StepCostModel()
    step = make_step([100] * 4, 0)
    for _ in range(20):
        model.learn(step, StepResult(0))
        model.learn(step, StepResult(0, aborted=True, graph_us=5))
        model.learn(step, StepResult(0, error="no", graph_us=5))
        model.learn(ScheduledStep(0, StepKind.MOVE), StepResult(0, graph_us=5))
    assert not model.is_known


def test_the_same_steps_give_the_same_coefficients() -> None:
    first, second = trained(random.Random(6), 300, 0.1), trained(random.Random(6), 300, 0.1)
    assert (first.base_s, first.sequence_s, first.context_s) == (second.base_s, second.sequence_s, second.context_s)


def test_the_drift_follows_a_slower_device_quickly() -> None:
    """After 20 slower steps, the predictions follow the slower device.

    Without the drift term, hundreds of earlier steps would outweigh the new ones for many seconds.
    """
    model, rng = trained(random.Random(7), 400), random.Random(7)
    for _ in range(20):
        rows = [rng.randrange(1, 3000) for _ in range(rng.randrange(1, 64))]
        model.learn(step := make_step(rows, 16), answer(step, 1.4 * seconds(rows, 16)))
    assert model.seconds(32, 16_000, 16) == pytest.approx(1.4 * seconds([500] * 32, 16), rel=0.06)


def test_an_interrupted_step_has_little_effect() -> None:
    model = trained(random.Random(8), 400)
    step = make_step([500] * 32, 0)
    model.learn(step, answer(step, 50 * seconds([500] * 32, 0)))
    assert model.seconds(32, 16_000, 0) == pytest.approx(seconds([500] * 32, 0), rel=0.15)
