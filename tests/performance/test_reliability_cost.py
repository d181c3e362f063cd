"""Tests the benchmark that compares servers with and without self-checks, API keys and audit log.

A scripted server replaces the real one.
"""

import json
from pathlib import Path

import pytest

from performance.load.reliability_cost import main
from performance.program import EXIT_FAILURES

TESTS = Path(__file__).resolve().parents[1]

STAND_IN = """
import sys
import time

sys.path.insert(0, {tests!r})
from support.fake_openai_server import Reply, fake_openai_server

has_keys = any(text.startswith("serving_config.api_keys_file=") for text in sys.argv)
assert has_keys == any(text.startswith("serving_config.audit_log=") for text in sys.argv)
assert has_keys != ("serving_config.row_check_interval=0" in sys.argv)
assert has_keys != ("serving_config.canary_interval_s=0" in sys.argv)
with open({record!r}, "a") as file:
    file.write("on " if has_keys else "off ")
gap_s = {on_gap_s} if has_keys else 0.01
with fake_openai_server(lambda *_: Reply(tokens=4, gap_s=gap_s)) as server:
    print(f"ready http://127.0.0.1:{{server.port}}", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("on_gap_s", "code"), [(0.03, EXIT_FAILURES), (0.001, 0)])
def test_the_ratio_of_the_times_per_token_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_gap_s: float, code: int
) -> None:
    program, path, record = tmp_path / "stand_in.py", tmp_path / "result.json", tmp_path / "record"
    program.write_text(STAND_IN.format(tests=str(TESTS), record=str(record), on_gap_s=on_gap_s))
    arguments = ["--pairs", "2", "-X", "20", "-T", "0.2", "--config", "c.yaml", "--json", str(path)]
    assert main(arguments, program) == code
    results = json.loads(path.read_text())
    assert record.read_text().split() == ["on", "off", "off", "on"]
    assert results["pass"] == (code == 0)
    assert results["min"] <= results["ratio"] <= results["max"]
    assert len(results["ratios"]) == 2
    assert (results["ratio"] > 1.0) == (on_gap_s > 0.01)
    assert f"ratio {results['ratio']:.4f} (median;" in capsys.readouterr().out
