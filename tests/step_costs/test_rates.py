"""Tests how a step changes the learnt mean times per token and per moved block."""

from __future__ import annotations

import pytest

from llm_serving.ipc.shm import MoveKind
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind, StepResult
from llm_serving.step_costs.rates import Rate, learn_from_step


def learned(step: ScheduledStep, **result: object) -> tuple[float | None, float | None]:
    """Returns the seconds per computed token and per moved block after one step of 6 ms."""
    prefill, move = Rate(), Rate()
    learn_from_step(step, StepResult(step.seq, **{"graph_us": 6000, **result}), prefill, move)
    return prefill.seconds_per_unit, move.seconds_per_unit


@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.MIXED])
def test_a_step_with_prompts_gives_the_time_of_a_token(kind: StepKind) -> None:
    assert learned(ScheduledStep(0, kind, token_ids=[1, 2, 3])) == (pytest.approx(0.002), None)


def test_a_move_gives_the_time_of_a_block() -> None:
    moves = [BlockMove(MoveKind.SWAP_OUT, block, block) for block in (1, 2)]
    assert learned(ScheduledStep(0, StepKind.MOVE, moves=moves)) == (None, pytest.approx(0.003))


@pytest.mark.parametrize("result", [{"aborted": True}, {"error": "failed"}, {"graph_us": 0}])
def test_a_step_that_failed_or_never_ran_teaches_nothing(result: dict[str, object]) -> None:
    assert learned(ScheduledStep(0, StepKind.PREFILL, token_ids=[1]), **result) == (None, None)


def test_a_decode_step_teaches_nothing() -> None:
    assert learned(ScheduledStep(0, StepKind.DECODE, token_ids=[1])) == (None, None)


def test_the_latest_steps_have_the_largest_weight() -> None:
    rate = Rate()
    for _ in range(100):
        rate.note(1.0, 1)
    for _ in range(100):
        rate.note(3.0, 1)
    assert rate.seconds_per_unit == pytest.approx(3.0, rel=0.05)
