"""Tests the benchmark that compares servers with and without self-checks, API keys and audit log.

A scripted server replaces the real one.
"""

import json
from pathlib import Path

import pytest

from performance.load import reliability_cost
from performance.load.reliability_cost import MET, MISSED, NOT_DECIDED, main, verdict
from performance.program import EXIT_FAILURES, EXIT_NOT_STARTED

TESTS = Path(__file__).resolve().parents[1]

STAND_IN = """
import hashlib
import json
import sys
import time

sys.path.insert(0, {tests!r})
from support.fake_openai_server import Reply, fake_openai_server

keys = [text.partition("=")[2] for text in sys.argv if text.startswith("serving_config.api_keys_file=")]
has_keys = bool(keys)
assert all(" admin " in open(file).read() for file in keys), "the client must read /metrics"
assert has_keys == any(text.startswith("serving_config.audit_log=") for text in sys.argv)
assert "speculative_config.method=off" in sys.argv
assert has_keys != ("serving_config.row_check_interval=0" in sys.argv)
assert has_keys != ("serving_config.canary_interval_s=0" in sys.argv)
name = "on" if has_keys else "off"
num_recorded = 0


def reply(index, _):
    return Reply(tokens=4, gap_s=0.001)


def record(requests):
    # The clients read the metrics before and after each turn. Requests of a warm-up come before the first reading.
    global num_recorded
    turn, num_recorded = requests[num_recorded:], len(requests)
    prompts = sorted(json.dumps([each["prompt"], each["max_tokens"]]) for each in turn)
    if prompts:
        with open({record!r}, "a") as file:
            print(name, len(prompts), hashlib.sha256("".join(prompts).encode()).hexdigest(), file=file)


cpu_s = {on_cpu_s} if has_keys else {off_cpu_s}


def metrics(state):
    record(state.requests)
    return f"llm_serving_cpu_seconds_total {{4 * cpu_s * len(state.requests)}}"


text = None if cpu_s is None else metrics
with fake_openai_server(reply, text) as server:
    print(f"ready http://127.0.0.1:{{server.port}}", flush=True)
    time.sleep(60)
"""


def run(folder: Path, on_cpu_s: float | None, off_cpu_s: float | None) -> int:
    """Runs two pairs of scripted servers, whose metrics grow by these CPU seconds with each token."""
    program = folder / "stand_in.py"
    record = str(folder / "record")
    program.write_text(STAND_IN.format(tests=str(TESTS), record=record, on_cpu_s=on_cpu_s, off_cpu_s=off_cpu_s))
    arguments = ["--pairs", "2", "--rounds", "2", "--requests", "4", "--clients", "2", "--config", "c.yaml"]
    arguments += ["--json", str(folder / "result.json")]
    return main(arguments, program)


@pytest.fixture(autouse=True)
def one_warm_up_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliability_cost, "WARM_UP_ROUNDS", 1)


@pytest.mark.parametrize(("on_cpu_s", "code"), [(0.03, EXIT_FAILURES), (0.009, 0)])
def test_the_ratio_of_the_processor_times_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_cpu_s: float, code: int
) -> None:
    assert run(tmp_path, on_cpu_s, 0.01) == code
    results = json.loads((tmp_path / "result.json").read_text())
    pair = ("off", "on", "on", "off", "off", "on")  # a round that does not count, and two that do
    names = (*pair, *reversed(pair))
    # Each turn has 8 requests of a warm-up, and then 4 measured ones.
    record = [line.split() for line in (tmp_path / "record").read_text().splitlines()]
    assert [(name, count) for name, count, _ in record] == [(name, count) for name in names for count in ("8", "4")]
    turns = [(warm_up, turn) for (*_, warm_up), (*_, turn) in zip(record[::2], record[1::2], strict=True)]
    assert turns[::2] == turns[1::2], "both servers of a pair get the same requests"
    assert len({digest for *_, digest in record}) == 12, "the requests change with every round"
    assert results["verdict"] == (MISSED if code else MET)
    assert results["cpu"]["ratios"] == pytest.approx([on_cpu_s / 0.01] * 2)
    assert results["cpu"]["standard_error"] == pytest.approx(0.0, abs=1e-9)
    assert len(results["time_per_token"]["ratios"]) == 2
    assert f"ratio {on_cpu_s / 0.01:.4f} (standard error 0.0000); limit 1.01: " in capsys.readouterr().out


def test_a_server_without_the_metric_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, None, None) == EXIT_NOT_STARTED
    assert "has no metric llm_serving_cpu_seconds_total" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0], NOT_DECIDED),
        ([1.0, 1.002, 0.999], MET),
        ([1.03, 1.032, 1.029], MISSED),
        ([0.8, 1.0, 1.3], NOT_DECIDED),
        ([1.0, 1.015], NOT_DECIDED),
    ],
)
def test_a_mean_within_its_standard_error_of_the_limit_decides_nothing(ratios: list[float], expected: str) -> None:
    assert verdict(ratios, 1.01) == expected
