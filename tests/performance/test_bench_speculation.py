"""Tests how the benchmark of speculation counts decode steps."""

from __future__ import annotations

import pytest

from llm_serving.ipc.drafts import REJECTED
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.telemetry.metrics import Metrics
from performance.bench.speculation_main import decode_counts


def test_a_step_counts_once_for_each_sequence_and_a_rejected_draft_is_no_token() -> None:
    """The first step has two sequences with two and one drafts. One draft is right, one is wrong, one is behind it."""
    metrics = Metrics(process=False)
    drafted = ScheduledStep(0, StepKind.DECODE, rows=[0, 0, 0, 1, 1], token_ids=[5, 6, 7, 8, 9], num_drafts=3)
    metrics.step(drafted, StepResult(0, [6, 4, REJECTED, 3, REJECTED], draft_us=2000), 0.01, 0.0)
    metrics.step(ScheduledStep(1, StepKind.DECODE, rows=[0], token_ids=[4]), StepResult(1, [2]), 0.01, 0.0)
    assert decode_counts(metrics.exposition().decode()) == {
        "draft_tokens": 3.0,
        "accepted_draft_tokens": 1.0,
        "draft_model_seconds": pytest.approx(0.002),
        "decode_steps": 3.0,
        "decode_tokens": 4.0,
    }
