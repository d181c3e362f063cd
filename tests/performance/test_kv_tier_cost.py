"""Tests the verdict of the benchmark that measures the cost of KV tiers without hits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from performance.bench.kv_tier_cost_main import WITH, WITHOUT, Times, _parse, _report


@pytest.mark.parametrize(
    ("ratios", "code", "verdict"),
    [
        ((1.0, 1.002, 0.998), 0, "is kept"),
        ((1.05, 1.052, 1.048), 1, "is exceeded"),
        ((0.95, 1.09, 1.02), 0, "undecided"),
    ],
)
def test_the_limit_counts_only_outside_of_two_standard_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratios: tuple[float, ...], code: int, verdict: str
) -> None:
    options = _parse(["--json", str(tmp_path / "cost.json")])
    seconds = {WITHOUT: [2.0] * len(ratios), WITH: [2.0 * ratio for ratio in ratios]}
    times = Times(seconds, {WITHOUT: [3.0] * len(ratios), WITH: [3.3] * len(ratios)})
    assert _report(options, times, 7.0) == code
    output = capsys.readouterr().out
    assert verdict in output
    assert "processor time: ratio 1.1000, standard error 0.0000" in output
    written = json.loads((tmp_path / "cost.json").read_text())
    assert written["ratio"] == pytest.approx(sum(ratios) / len(ratios))
    assert written["ratios"] == pytest.approx(list(ratios))


def test_one_round_has_no_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["--rounds", "1"])
    assert "a standard error needs at least 2" in capsys.readouterr().err
