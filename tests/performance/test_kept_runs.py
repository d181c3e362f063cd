"""Tests that stored results of load tests can be read again."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from performance.load.client import LoadRun
from performance.load.options import LoadOptions
from performance.load.stream import RequestRecord
from performance.program import UsageError
from performance.simulation.kept_runs import read_others, read_runs, write_runs
from performance.simulation.runs import NOWHERE

OPTIONS = LoadOptions(NOWHERE, rate=2.0, duration=1.0)


def a_run() -> LoadRun:
    answered = RequestRecord(0, 1.0, 1.25, array("d", [2.0, 2.5]), 3.0, 200, 7, 2, True, "length", "a", None)
    refused = RequestRecord(1, 2.0, 2.0, array("d"), 2.5, 429, failure="http 429", detail="full")
    return LoadRun(OPTIONS, "model", [answered, refused], 1.0, 1e9, 0.5, interrupted=False)


def test_written_runs_can_be_read_again(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs.json", [a_run(), a_run()], 0.25)
    assert read_runs(tmp_path / "runs.json", [OPTIONS, OPTIONS]) == [a_run(), a_run()]
    assert read_others(tmp_path / "runs.json") == 0.25


@pytest.mark.parametrize("options", [[OPTIONS], [OPTIONS, OPTIONS, OPTIONS], [OPTIONS, replace(OPTIONS, rate=3.0)]])
def test_runs_of_other_loads_are_rejected(tmp_path: Path, options: list[LoadOptions]) -> None:
    write_runs(tmp_path / "runs.json", [a_run(), a_run()])
    with pytest.raises(UsageError, match="--kept"):
        read_runs(tmp_path / "runs.json", options)


@pytest.mark.parametrize("text", ["", "{}", "[{}]", "[7]", '{"runs": [{}], "others": "none"}'])
def test_a_file_without_runs_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(UsageError, match="--kept"):
        read_runs(tmp_path / "runs.json", [OPTIONS])
    with pytest.raises(UsageError, match="--kept"):
        read_others(tmp_path / "runs.json")
    with pytest.raises(UsageError, match="--kept"):
        read_runs(tmp_path / "none.json", [OPTIONS])
