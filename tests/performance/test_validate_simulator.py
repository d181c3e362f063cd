"""The simulator held against real runs: servers in turns, a fit of all calibrations, each load compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from performance.simulation import reality
from performance.simulation.fit import read_fit
from performance.simulation.reality import CALIBRATION, PROBE, VALIDATION, Load, main


def test_no_load_is_both_fitted_and_compared() -> None:
    seen = (*CALIBRATION, PROBE)
    fitted = {(load.rate, load.duration, load.prompts, load.outputs) for load in seen}
    assert not fitted & {(load.rate, load.duration, load.prompts, load.outputs) for load in VALIDATION}
    assert not {load.seed for load in seen} & {load.seed for load in VALIDATION}


def test_scaled_loads_have_as_many_requests() -> None:
    load = Load("some", 8.0, 10.0, (4, 8), (8, 16), 1)
    assert load.options(0.5).count == load.options(1.0).count == 80
    assert load.options(0.5).rate == 4.0


def test_a_real_server_is_fitted_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reality, "CALIBRATION", (Load("few", 20, 1, (4, 16), (8, 16), 11),))
    monkeypatch.setattr(reality, "PROBE", Load("probe", 20, 1, (4, 16), (8, 16), 21))
    monkeypatch.setattr(reality, "VALIDATION", (Load("others", 20, 1, (4, 16), (8, 16), 1),))
    fit, result, kept = tmp_path / "fit.json", tmp_path / "result.json", tmp_path / "kept"
    tiny = ["--config", "llama_tiny_cpu.yaml"]
    assert main([*tiny, "--save-fit", str(fit), "--json", str(result), "--keep", str(kept)]) == 0
    assert read_fit(fit).provenance["model"] == "llama_tiny"
    figures = json.loads(result.read_text())["others"]
    assert figures["tokens/s"]["measured"] > 0
    assert figures["TTFT ms p50"]["simulated"] > 0
    told = capsys.readouterr().out
    assert "times as long as in the calibrations right before it" in told
    assert "all loads: " in told
    assert main([*tiny, "--kept", str(kept)], program=tmp_path / "none") == 0
    assert capsys.readouterr().out.splitlines() == told.splitlines()[:-1]
    assert main([*tiny, "--keep", str(kept)], program=tmp_path / "none") == 2
    assert "something in it already" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "model_config.no_such_key=1"]) == 2
    assert "no_such_key" in capsys.readouterr().err
