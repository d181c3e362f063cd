"""Tests the program that compares the simulator with real runs.

The program runs several servers, fits one model to all calibration runs, and compares each load.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from performance.simulation import reality, steadiness
from performance.simulation.fit import read_fit
from performance.simulation.reality import main
from performance.simulation.reality_loads import CALIBRATION, PROBE, VALIDATION, Load


def test_no_load_is_used_for_both_fit_and_comparison() -> None:
    seen = (*CALIBRATION, *PROBE)
    fitted = {(load.rate, load.duration, load.prompts, load.outputs) for load in seen}
    assert not fitted & {(load.rate, load.duration, load.prompts, load.outputs) for load in VALIDATION}
    validated = [load.options(1.0, part).seed for load in VALIDATION for part in range(load.parts)]
    assert len(set(validated)) == len(validated)
    assert not {load.seed for load in seen} & set(validated)


def test_scaled_loads_have_as_many_requests() -> None:
    load = Load("some", 8.0, 10.0, (4, 8), (8, 16), 1)
    assert load.options(0.5).count == load.options(1.0).count == 80
    assert load.options(0.5).rate == 4.0


@pytest.mark.sweep
def test_a_real_server_is_fitted_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reality, "CALIBRATIONS", 1)
    monkeypatch.setattr(reality, "SEEDS", 2)
    monkeypatch.setattr(reality, "CALIBRATION", (Load("few", 20, 1, (4, 16), (8, 16), 11),))
    monkeypatch.setattr(
        reality, "PROBE", (Load("a", 20, 1, (4, 16), (8, 16), 21), Load("b", 60, 0.1, (4, 16), (8, 16), 22))
    )
    monkeypatch.setattr(reality, "VALIDATION", (Load("others", 20, 1, (4, 16), (8, 16), 1, parts=2),))
    fit, result, kept = tmp_path / "fit.json", tmp_path / "result.json", tmp_path / "kept"
    tiny = ["--config", "llama_tiny_cpu.yaml", "--tries", "2"]
    monkeypatch.setattr(steadiness, "TOLERANCE", 1e-12)  # no machine is this steady, so every load is tried again
    assert main([*tiny, "--save-fit", str(fit), "--json", str(result), "--keep", str(kept)]) == 3
    assert read_fit(fit).provenance["model"] == "llama_tiny"
    others = json.loads(result.read_text())["loads"]["others"]
    assert not others["steady"]
    assert [[one["compared"] for one in tries].count(True) for tries in others["parts"]] == [1, 1]
    for tries in others["parts"]:
        assert len(tries) == 2
        assert tries[0]["after"] == tries[1]["before"]
    assert others["parts"][0][1]["after"] == others["parts"][1][0]["before"]
    assert others["figures"]["tokens/s"]["measured"] > 0
    assert others["figures"]["TTFT ms p50"]["simulated"] > 0
    told = capsys.readouterr().out
    assert "discarded: others: in half of the parts" in told
    assert main([*tiny, "--kept", str(kept)], program=tmp_path / "none") == 3
    assert capsys.readouterr().out.splitlines() == told.splitlines()[:-1]
    monkeypatch.setattr(steadiness, "TOLERANCE", 1e9)
    monkeypatch.setattr(steadiness, "OTHERS_TOLERANCE", 1e9)
    assert main([*tiny, "--kept", str(kept)], program=tmp_path / "none") == 0
    assert "all loads: " in capsys.readouterr().out
    (kept / "clients of others, part 1, try 0.json").unlink()
    assert main([*tiny, "--kept", str(kept)], program=tmp_path / "none") == 2
    assert "part 1, try 0" in capsys.readouterr().err
    assert main([*tiny, "--keep", str(kept)], program=tmp_path / "none") == 2
    assert "the folder is not empty" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "model_config.no_such_key=1"]) == 2
    assert "no_such_key" in capsys.readouterr().err
