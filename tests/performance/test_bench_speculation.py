"""Tests the benchmark of speculation: decode steps, batch sizes, spreads, and errors of the server."""

from __future__ import annotations

import pytest

from llm_serving.ipc.drafts import REJECTED
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.telemetry.metrics import Metrics
from performance.bench import speculation_main
from performance.bench.speculation_main import Workload, compare, decode_counts, run_round, workloads
from performance.load.endpoint import Endpoint
from performance.program import LoadTestError
from support.fake_openai_server import Reply, fake_openai_server


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


def test_random_text_is_measured_up_to_the_default_batch_size() -> None:
    clients = {each.name: each.clients for each in workloads() if each.name.startswith("random")}
    assert clients == {"random1": 1, "random4": 4, "random16": 16, "random64": 64}


def test_every_line_has_medians_and_spreads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rate of each server is that of its warm-up, which does not count."""
    rates = {1: [9.0, 100.0, 200.0, 400.0], 2: [9.0, 150.0, 200.0, 800.0]}
    monkeypatch.setattr(speculation_main, "run_round", lambda endpoint, _: (rates[endpoint.port].pop(0), ["text"]))
    names = ("draft_tokens", "accepted_draft_tokens", "draft_model_seconds", "decode_steps", "decode_tokens")
    steps = iter([dict.fromkeys(names, 0.0), dict.fromkeys(names, 8.0)])
    monkeypatch.setattr(speculation_main, "counters", lambda _: next(steps))
    figures = compare(Workload("random64", 64, "/v1/completions", []), Endpoint("a", 1), Endpoint("a", 2), 3)
    assert (figures["ratio"], figures["ratio_low"], figures["ratio_high"]) == (1.5, 1.0, 2.0)
    line = capsys.readouterr().out
    assert line.startswith(
        "random64: 1.500 (1.000 to 2.000) times, 200.0 (100.0 to 400.0) -> 200.0 (150.0 to 800.0) tokens/s, "
    )


def test_the_message_of_a_failed_request_is_reported() -> None:
    workload = Workload("random1", 1, "/v1/completions", [{"prompt": [5], "max_tokens": 1}])
    expected = pytest.raises(LoadTestError, match=r"/v1/completions returned 503: .*come back later")
    with fake_openai_server(lambda *_: Reply("status", status=503)) as server, expected:
        run_round(Endpoint("127.0.0.1", server.port), workload)
