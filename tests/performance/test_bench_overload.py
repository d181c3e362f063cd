"""A load above the server's capacity: the peak, the rejections and their times, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from performance.load import overload
from performance.load.overload import main
from performance.load.watches import children_mib, sampled


def test_a_small_queue_rejects_requests_and_the_figures_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overload, "SETTLE_S", 0.1)
    path = tmp_path / "result.json"
    options = ["--rates", "5,10", "--peak-duration", "1", "--duration", "2", "--factor", "30", "--max-waiting", "2"]
    one_row = ["--set", "model_config.decode_batch_size=[1]", "--set", "model_config.prefill_batch_size=[1]"]
    assert main(["--config", "llama_tiny_cpu.yaml", *options, *one_row, "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert [row["rate"] for row in results["rates"]] == [5, 10]
    assert results["peak_goodput_per_s"] == max(row["goodput_per_s"] for row in results["rates"]) > 0
    assert results["overload_rate"] == 30 * results["peak_rate"]
    assert 0 < results["refused"] < results["requests"]
    assert 0 < results["refusal_ms"]["p50"] <= results["refusal_ms"]["p99"] <= results["refusal_ms"]["max"]
    assert results["client_lateness_ms"]["p99"] <= results["client_lateness_ms"]["max"]
    assert 0.0 <= results["stolen_share"] < 1.0
    assert results["memory_mib"]["last_third"] > 100
    assert f"{results['requests']}" in capsys.readouterr().out


def test_memory_includes_all_descendant_processes() -> None:
    grandchild = "import time; data = bytearray(64 << 20); print('ready', flush=True); time.sleep(60)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with sampled(1.0, children_mib) as memory:
            pass
        subprocess.run(["pkill", "-P", str(process.pid)], check=True)
        process.wait()
    assert max(memory) > 64
