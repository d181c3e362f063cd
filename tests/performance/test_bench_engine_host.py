"""Tests the benchmark of the engine's host time.

The parts of the time add up to the total. The fit finds the time per step and the time per sequence.
"""

import json
from pathlib import Path

import pytest

from performance.bench.engine_host import PARTS, Figures, linear_fit, main, measure


def test_the_parts_sum_to_the_step() -> None:
    figures = measure(3, steps=20, repeats=1)
    assert set(figures.parts) == set(PARTS)
    assert sum(figures.parts.values()) == pytest.approx(figures.us_per_step)
    measured = set(PARTS) - {"other"}  # the remainder may be negative if the machine pauses between two clock readings
    assert min(figures.parts[name] for name in measured) > 0


def test_the_fit_finds_a_line() -> None:
    figures = [Figures(count, 50.0 + 2.0 * count, {}) for count in (1, 8, 64)]
    assert linear_fit(figures) == (pytest.approx(50.0), pytest.approx(2.0))
    assert linear_fit(figures[:1]) == (0.0, 52.0)


def test_the_program_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    assert main(["--sequences", "1,2", "--steps", "5", "--repeats", "1", "--json", str(path)]) == 0
    assert "us per step" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert [row["sequences"] for row in content["rows"]] == [1, 2]
    assert set(content["rows"][0]) == {"sequences", "us_per_step", "us_per_sequence", "parts_us"}


def test_replicas_behind_a_router_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "replicas.json"
    options = ["--replicas", "2,3", "--sequences", "2", "--steps", "5", "--repeats", "1", "--step-ms", "10"]
    assert main([*options, "--json", str(path)]) == 0
    assert "replicas of a thread" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["replicas"] for row in rows] == [2, 3]
    for row in rows:
        assert row["us_per_step"] > 0
        assert row["drives"] == pytest.approx(10_000 / row["us_per_step"])
