"""The comparison of native and fused operators, with real agents of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from performance.bench import op_tables_main
from performance.bench.op_tables_main import main

SMALL = ["--batch", "2", "--prompt", "8", "--new", "4", "--prefill", "16", "--repeats", "1"]


def test_a_row_has_both_tables_and_their_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--config", "llama_tiny_cpu.yaml", "--set", "model_config.model_dtype=bfloat16", "--weights", "int8"]
    file = tmp_path / "rows.json"
    assert main([*settings, *SMALL, "--limit", "1000", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    (model,) = json.loads(file.read_text(encoding="utf-8"))["models"]
    assert model["numbers"]["weight_format"] == "int8"
    assert [row["name"] for row in model["rows"]] == ["batch 2", "prefill 16"]
    for row in model["rows"]:
        assert row["ratio"] == pytest.approx(row["native"]["step_ms"] / row["fused"]["step_ms"])
        assert f"{row['ratio']:.2f}" in shown
    assert shown.strip().endswith("0 ratios above 1000.0")


@pytest.mark.parametrize(("limit", "code"), [("1.2", 1), ("1.3", 1), ("1.5", 0)])
def test_a_ratio_above_the_limit_is_told(
    limit: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"ratio": 1.25}, {"ratio": 1.5}, {"ratio": 0.9}]
    monkeypatch.setattr(op_tables_main, "compare", lambda name, weights, parsed: {"rows": rows})
    assert main(["--config", "llama_tiny_cpu.yaml", *SMALL, "--limit", limit]) == code
    above = sum(row["ratio"] > float(limit) for row in rows)
    assert capsys.readouterr().out.strip().endswith(f"{above} ratios above {limit}")


def test_a_type_that_native_operators_have_not_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "llama_tiny_cpu.yaml", "--set", "model_config.model_dtype=float32", *SMALL]) == 2
    assert "model_config.op_table = 'native'" in capsys.readouterr().err
