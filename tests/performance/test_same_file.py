"""Tests the comparison with llama.cpp on one GGUF file: order of the runs, table, errors, and our own rates."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from performance.models.folders import write_model
from performance.peers import same_file
from performance.program import LoadTestError
from support.gguf_models import WIDE_FAMILIES, write_gguf_model
from support.small_configs import TINY_LLAMA

SMALL = [
    "model_config.max_generate_length=64",
    "model_config.seq_length=[64]",
    "pa_config.num_blocks=64",
    "pa_config.decode_seq_length=64",
    f"tokenizer.vocab_file={TINY_LLAMA / 'tokenizer.json'}",
]
ROUND = {"llama.cpp": {"batch 1": 10.0, "batch 8": 40.0}, "ours": {"batch 1": 20.0, "batch 8": 100.0}}


def test_the_table_has_medians_and_the_range_of_the_ratios() -> None:
    slow = {"llama.cpp": {"batch 1": 8.0, "batch 8": 40.0}, "ours": {"batch 1": 8.0, "batch 8": 100.0}}
    fast = {"llama.cpp": {"batch 1": 12.0, "batch 8": 40.0}, "ours": {"batch 1": 36.0, "batch 8": 100.0}}
    lines = [line.split() for line in same_file.table([ROUND, slow, fast]).splitlines()]
    assert lines[0] == ["tokens/s", "llama.cpp", "ours", "ratio", "smallest", "largest"]
    assert lines[1] == ["batch", "1", "10.0", "20.0", "2.00", "1.00", "3.00"]
    assert lines[2] == ["batch", "8", "40.0", "100", "2.50", "2.50", "2.50"]


def test_the_order_of_the_engines_alternates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    for name, function in (("llama.cpp", "_theirs"), ("ours", "_ours")):
        monkeypatch.setattr(same_file, function, lambda file, parsed, name=name: order.append(name) or ROUND[name])
    monkeypatch.setattr(same_file, "_file_of", lambda config: Path("model.gguf"))
    kept = tmp_path / "result.json"
    options = ["--config", "llama_tiny_cpu.yaml", "--python", "/none", "--rounds", "3", "--json", str(kept)]
    assert same_file.main(options) == 0
    assert order == ["llama.cpp", "ours", "ours", "llama.cpp", "llama.cpp", "ours"]
    assert json.loads(kept.read_text())["rounds"] == [ROUND] * 3


def test_a_config_without_a_gguf_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_file.main(["--config", "llama_tiny_cpu.yaml", "--python", "/none"]) == 2
    assert "has no GGUF file; give one with --file" in capsys.readouterr().err


def test_a_missing_llama_cpp_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_file, "_file_of", lambda config: Path("model.gguf"))
    assert same_file.main(["--config", "llama_tiny_cpu.yaml", "--python", "/none/python"]) == 2
    assert "llama.cpp: [Errno 2] No such file or directory: '/none/python'" in capsys.readouterr().err


def test_a_rate_that_noise_made_negative_is_refused() -> None:
    rows = {"batch 1": {"kind": "decode", "decode_tokens_per_s": -81.0}}
    with pytest.raises(LoadTestError, match=r"batch 1: a rate of -81\.0 proves nothing; --new must be at least 2"):
        same_file._rates("llama.cpp", rows)


def test_only_a_copy_with_floats_is_served_as_int4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {}
    monkeypatch.setattr(same_file, "measure_theirs", lambda peer, _: measured.update(theirs=peer.model) or {"a": 1.0})
    monkeypatch.setattr(same_file, "measure_ours", lambda settings, _: measured.update(ours=settings) or {"a": 1.0})
    write_model(WIDE_FAMILIES["llama"], tmp_path / "folder")
    files = {kind: tmp_path / f"{kind}.gguf" for kind in ("Q4_1", "F32")}
    for kind, file in files.items():
        write_gguf_model(tmp_path / "folder", file, kind)
    options = ["--config", "llama_tiny_cpu.yaml", "--python", "/none", "--rounds", "1", "--file", str(files["Q4_1"])]
    for setting in (*SMALL, "model_config.weight_format=int4"):
        options += ["--set", setting]
    assert same_file.main(options) == 2
    assert "the model folder holds int8 weights" in capsys.readouterr().err
    assert same_file.main([*options, "--own-file", str(files["F32"])]) == 0
    assert measured["theirs"] == str(files["Q4_1"])
    assert f"model_config.model_path={files['F32']}" in measured["ours"]
    assert "llama.cpp: Q4_1.gguf, ours: F32.gguf" in capsys.readouterr().out


@pytest.mark.usefixtures("forked_engine_agents")
def test_our_rates_come_from_the_engine_on_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(WIDE_FAMILIES["llama"], tmp_path / "folder")
    write_gguf_model(tmp_path / "folder", file, "Q8_0")
    parsed = argparse.Namespace(
        config="llama_tiny_cpu.yaml", settings=SMALL, threads=1, batch=(1, 2), prompt=8, new=5, prefill=(16,)
    )
    rates = same_file._ours(file, parsed)
    assert list(rates) == ["batch 1", "batch 2", "prefill 16"]
    assert all(rate > 0 for rate in rates.values())
