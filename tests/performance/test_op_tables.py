"""Tests the benchmark that compares native and fused operators. It runs real agents with a small model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from performance.bench import op_tables_main
from performance.bench.op_tables_main import main
from support.draft_models import write_shorter_model
from support.some_machine import CEILINGS

SMALL = ["--batch", "2", "--prompt", "8", "--new", "4", "--prefill", "16", "--repeats", "1"]


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the measurement of the machine's ceilings, which takes seconds and is tested elsewhere."""
    monkeypatch.setattr(op_tables_main, "measure_ceilings", lambda threads: CEILINGS)


@pytest.mark.usefixtures("forked_engine_agents")
def test_a_row_has_both_tables_and_their_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--config", "llama_tiny_cpu.yaml", "--set", "model_config.model_dtype=bfloat16", "--weights", "int8"]
    settings += ["--set", f"model_config.model_path={write_shorter_model(tmp_path / 'model', 1)}"]
    file = tmp_path / "rows.json"
    assert main([*settings, *SMALL, "--limit", "1000", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    (model,) = json.loads(file.read_text(encoding="utf-8"))["models"]
    assert model["numbers"]["weight_format"] == "int8"
    assert model["same_products"]
    side = {"weights": "int8", "products": "int8 by int8"}
    assert model["formats"] == {"fused": side, "native": side}
    assert [row["name"] for row in model["rows"]] == ["batch 2", "prefill 16"]
    for row in model["rows"]:
        assert row["ratio"] == pytest.approx(row["native"]["step_ms"] / row["fused"]["step_ms"])
        assert f"{row['ratio']:.2f}" in shown
    assert shown.strip().endswith("0 ratios above 1000.0")


@pytest.mark.parametrize(("limit", "code"), [("1.2", 1), ("1.3", 1), ("1.5", 0)])
def test_a_ratio_above_the_limit_sets_the_exit_code(
    limit: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"ratio": 1.25}, {"ratio": 1.5}, {"ratio": 0.9}]
    result = {"rows": rows, "same_products": True}
    monkeypatch.setattr(op_tables_main, "compare", lambda name, weights, fused_weights, parsed: result)
    assert main(["--config", "llama_tiny_cpu.yaml", *SMALL, "--limit", limit]) == code
    above = sum(row["ratio"] > float(limit) for row in rows)
    assert capsys.readouterr().out.strip().endswith(f"{above} ratios above {limit}")


def test_native_int4_is_compared_with_fused_weight_only_int4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark compares native int4 with fused weight-only int4, because both multiply bfloat16 by int4.

    Fused int4 also quantises activations. Therefore the limit of the ratio does not apply to native int4 over fused
    int4. The measured times are replaced by fixed values. Other tests run these engines.
    """
    planted = dict.fromkeys(op_tables_main.FIGURES, 1.5)
    monkeypatch.setattr(op_tables_main, "offline_engine", nullcontext)
    monkeypatch.setattr(op_tables_main, "measure_case", lambda *given: planted)
    given = ["--config", "llama_tiny_cpu.yaml", "--set", "model_config.model_dtype=bfloat16", "--weights", "int4"]
    file = tmp_path / "rows.json"
    arguments = [*given, "--fused-weights", "same", "int4", *SMALL, "--limit", "0", "--json", str(file)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    same, other = json.loads(file.read_text(encoding="utf-8"))["models"]
    native = {"weights": "int4", "products": "bfloat16 by int4"}
    fused = {"weights": "int4_weight_only", "products": "bfloat16 by int4"}
    assert (same["formats"], same["same_products"]) == ({"fused": fused, "native": native}, True)
    fused = {"weights": "int4", "products": "int8 by int4"}
    assert (other["formats"], other["same_products"]) == ({"fused": fused, "native": native}, False)
    assert same["numbers"]["weight_format"] == "int4_weight_only", "the ceiling is that of its own products"
    assert "native int4 (bfloat16 by int4) over fused int4_weight_only (bfloat16 by int4)\n" in shown
    assert "over fused int4 (int8 by int4); different precisions, the limit does not apply\n" in shown
    assert shown.strip().endswith("2 ratios above 0.0")


def test_a_type_without_native_operators_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "llama_tiny_cpu.yaml", "--set", "model_config.model_dtype=float32", *SMALL]) == 2
    assert "model_config.op_table = 'native'" in capsys.readouterr().err
