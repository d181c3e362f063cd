"""Tests the benchmark that measures what the flight recorder costs in a busy server.

The benchmark reads the cost from the server's metrics.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from performance.load.recorder import Share, main
from performance.program import LoadTestError

BEFORE = {
    "llm_serving_flight_recorder_seconds_total": 1.0,
    "llm_serving_steps_total": 100.0,
    "process_cpu_seconds_total": 5.0,
}


def test_fractions_refer_to_the_time_between_two_readings() -> None:
    after = dict(zip(BEFORE, (1.02, 1100.0, 6.0), strict=True))
    share = Share.of(3, 2.0, BEFORE, after)
    assert (share.clients, share.steps) == (3, 1000.0)
    assert share.us_per_step == pytest.approx(2000.0)
    assert share.recorder_us_per_step == pytest.approx(20.0)
    assert share.share_of_step == pytest.approx(0.01)
    assert share.share_of_cpu == pytest.approx(0.02)


@pytest.mark.parametrize("after", [{}, BEFORE])
def test_a_missing_metric_or_no_step_is_an_error(after: dict[str, float]) -> None:
    with pytest.raises(LoadTestError):
        Share.of(1, 1.0, BEFORE, after)


def test_processor_time_below_a_clock_tick_has_no_fraction() -> None:
    after = dict(zip(BEFORE, (1.001, 108.0, 5.0), strict=True))
    assert Share.of(1, 0.02, BEFORE, after).share_of_cpu is None


def test_the_cost_in_a_busy_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "shares.json"
    assert main(["--clients", "1,2", "--requests", "2", "--output-len", "40", "--json", str(result)]) == 0
    one, two = json.loads(result.read_text())["rows"]
    assert one["steps"] >= 2 * 39
    assert two["clients"] == 2
    assert 0.0 < one["share_of_step"] < 0.5
    assert 0.0 < one["share_of_cpu"] < 0.5
    assert "% of the step" in capsys.readouterr().out


@pytest.mark.sweep
def test_without_a_recorder_the_cost_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    off = ["--set", "log_config.flight_recorder_mib=0"]
    assert main(["--clients", "1", "--requests", "1", "--output-len", "8", *off]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[3] == "0.0"
