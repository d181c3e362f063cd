"""Tests the comparison with other engines: a scripted engine, the definitions of the rates, and the table."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from performance.peers import driver
from performance.peers.compare import comparison, engine_rows, main, parse_peer, peer_rows
from performance.peers.driver import MARK

FAKE_DRIVER = """
import time
import driver

def make_generate(request):
    def generate(prompts, new):
        time.sleep(0.01 + 0.001 * new)
    return generate

driver.main(make_generate)
"""


def row(kind: str, batch: int, prompt: int, rate: float) -> dict[str, Any]:
    rates = {"decode_tokens_per_s": rate if kind == "decode" else None, "prefill_tokens_per_s": rate}
    return {"kind": kind, "batch": batch, "prompt": prompt, **rates}


def test_a_driver_measures_decode_beyond_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    spent = {1: 2.0, 5: 10.0, 4: 0.0}
    monkeypatch.setattr(driver, "_seconds", lambda generate, prompts, new: spent[new])
    request = {"repeats": 3, "vocab_size": 100}
    result = driver._measure(lambda prompts, new: next(clock), ("decode", 2, 8, 5), request)
    assert result["decode_tokens_per_s"] == 2 * 4 / 8.0
    assert result["prefill_tokens_per_s"] == 2 * 8 / 2.0
    assert result["end_to_end_tokens_per_s"] == 2 * 5 / 10.0
    assert (result["ttft_ms"], len(result["repeats"])) == (2000.0, 3)


def test_all_prompts_of_a_measurement_are_different() -> None:
    request = {"vocab_size": 32000}
    prompts = [tuple(p) for seed in range(-1, 4) for p in driver._prompts(("decode", 8, 16, 4), request, seed)]
    assert len(set(prompts)) == len(prompts)


def test_rows_are_found_in_the_output_of_a_peer() -> None:
    output = f"loading\n{MARK}{json.dumps(row('decode', 8, 64, 5.0))}\nwarning: {MARK}\n"
    assert list(peer_rows(output)) == ["batch 8"]


def test_the_table_has_all_engines_and_the_ratios() -> None:
    ours = {"int8": engine_rows({"rows": [row("decode", 8, 64, 200.0), row("prefill", 1, 1024, 50.0)]})}
    peers = {"other": engine_rows({"rows": [row("decode", 8, 64, 100.0)]})}
    lines = comparison(ours, peers).splitlines()
    assert lines[0].split() == ["tokens/s", "batch", "8", "prefill", "1024"]
    assert lines[1].split() == ["ours", "int8", "200", "50.0"]
    assert lines[2].split() == ["other", "100", "-"]
    assert lines[-1].split() == ["other", "2.00", "-"]


def test_a_comparison_can_be_drawn_from_stored_rows(tmp_path: Path) -> None:
    kept, ours, picture = tmp_path / "peers.json", tmp_path / "ours.json", tmp_path / "compare.png"
    kept.write_text(json.dumps({"other": engine_rows({"rows": [row("decode", 8, 64, 100.0)]})}))
    ours.write_text(json.dumps({"rows": [row("decode", 8, 64, 200.0), row("prefill", 1, 1024, 50.0)]}))
    assert main(["--json", str(kept), "--ours", f"int8={ours}", "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_peer_runs_with_its_own_python_and_its_rows_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm_driver.py").write_text(FAKE_DRIVER)
    (tmp_path / "driver.py").write_text(Path(driver.__file__).read_text())
    monkeypatch.setattr("performance.peers.compare.FOLDER", tmp_path)
    kept = tmp_path / "peers.json"
    kept.write_text(json.dumps({"fake": {"batch 99": row("decode", 99, 64, 1.0)}}))
    peer = f"fake=vllm:{sys.executable}:/no/model"
    size = ["--batch", "1,2", "--prompt", "4", "--new", "6", "--prefill", "16", "--repeats", "2"]
    assert main(["--peer", peer, *size, "--json", str(kept), "--lock", str(tmp_path / "lock")]) == 0
    rows = json.loads(kept.read_text())["fake"]
    assert list(rows) == ["batch 99", "batch 1", "batch 2", "prefill 16"]
    assert all(one["prefill_tokens_per_s"] > 0 for one in rows.values())
    assert "fake" in capsys.readouterr().out


def test_a_failed_peer_is_reported_and_sets_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peer", "gone=vllm:/no/such/python:/no/model"]) == 1
    assert "gone: [Errno 2]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "x=what:python:model", "x=vllm:python"])
def test_a_peer_is_specified_by_kind_python_and_model(text: str) -> None:
    with pytest.raises(Exception, match="expected NAME=KIND:PYTHON:MODEL"):
        parse_peer(text)
