"""Tests the benchmark of the quiet mode. A scripted server replaces the real one."""

import json
from pathlib import Path

import pytest

from performance.bench import quiet_main
from performance.bench.quiet_main import main
from performance.program import EXIT_FAILURES, EXIT_NOT_STARTED

TESTS = Path(__file__).resolve().parents[1]

STAND_IN = """
import json
import sys
import time

sys.path.insert(0, {tests!r})
from support.fake_openai_server import Reply, fake_openai_server

[mode] = [text.partition("=")[2] for text in sys.argv if text.startswith("power.mode=")]


def reply(index, body):
    with open({record!r} + "-" + mode, "a") as file:
        print(json.dumps([body["prompt"], body["max_tokens"]]), file=file)
    return Reply({kind!r}, tokens=4)


def metrics(state):
    cpu_s = {{"normal": 0.004, "quiet": 0.003}}[mode] * 4 * len(state.requests)
    lines = [f"llm_serving_cpu_seconds_total {{cpu_s}}"] if {has_metric} else []
    return "\\n".join([*lines, f"llm_serving_energy_joules_total {{10 * cpu_s}}"] if {has_energy} else lines)


with fake_openai_server(reply, metrics) as server:
    with open({record!r}, "a") as file:
        print(mode, file=file)
    print(f"ready http://127.0.0.1:{{server.port}}", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if not {is_busy} or mode == "normal":
            time.sleep(0.05)
"""


def run(folder: Path, *, kind: str = "ok", busy: bool = False, metric: bool = True, energy: bool = True) -> int:
    """Runs two rounds with scripted servers. ``busy``: the quiet server uses a core without requests."""
    program = folder / "stand_in.py"
    program.write_text(
        STAND_IN.format(
            tests=str(TESTS), record=str(folder / "record"), kind=kind, is_busy=busy, has_metric=metric,
            has_energy=energy,
        )
    )  # fmt: skip
    options = ["--rounds", "2", "--idle-seconds", "0.5", "-X", "20", "-T", "0.5", "--config", "c.yaml"]
    return main([*options, "--json", str(folder / "result.json")], program)


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_main, "REST_INTERVAL_S", 0.1)
    monkeypatch.setattr(quiet_main, "MAX_IDLE_PERCENT", 5.0)


def test_both_modes_get_the_same_load_in_alternating_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    starts = (tmp_path / "record").read_text().split()
    assert starts == ["normal", "quiet", "normal", "quiet", "quiet", "normal"], "two starts come before the rounds"
    sent = {mode: sorted((tmp_path / f"record-{mode}").read_text().splitlines()) for mode in ("normal", "quiet")}
    assert sent["normal"] == sent["quiet"]
    assert len(set(sent["quiet"])) == 2 * (10 + quiet_main.WARM_UP), "the requests change with every round"
    results = json.loads((tmp_path / "result.json").read_text())
    for each in results["rounds"]:
        assert each["normal"]["cpu_s_per_1000_tokens"] == pytest.approx(4.0)
        assert each["quiet"]["cpu_s_per_1000_tokens"] == pytest.approx(3.0)
        assert each["quiet"]["joules_per_1000_tokens"] == pytest.approx(30.0)
        assert each["quiet"]["idle_percent"] == pytest.approx(
            each["quiet"]["idle_server_percent"] + each["quiet"]["idle_agents_percent"]
        )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    cells = "4.00 (4.00 to 4.00) 3.00 (3.00 to 3.00) 0.750 (0.750 to 0.750)"
    assert f"light load: CPU seconds for 1000 tokens {cells}" in lines
    assert lines[-1].endswith("limit 5 %: met")


@pytest.mark.sweep
def test_a_quiet_server_that_is_busy_without_requests_misses_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet_main, "REST_PERCENT", 1000.0)
    assert run(tmp_path, busy=True) == EXIT_FAILURES
    assert capsys.readouterr().out.rstrip().endswith("limit 5 %: missed")
    for each in json.loads((tmp_path / "result.json").read_text())["rounds"]:
        assert each["normal"]["idle_server_percent"] < 5 < each["quiet"]["idle_server_percent"]


def test_a_server_that_does_not_come_to_rest_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet_main, "REST_LIMIT_S", 0.3)
    monkeypatch.setattr(quiet_main, "REST_PERCENT", 0.0)
    assert run(tmp_path) == EXIT_NOT_STARTED
    assert "of a core 0.3 s after its start, without requests; at rest" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


@pytest.mark.sweep
def test_without_rapl_the_table_has_no_joules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, energy=False) == 0
    assert "light load: joules for 1000 tokens - - -" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("kind", "metric", "message"),
    [("status", True, "requests failed: "), ("ok", False, "the server has no metric llm_serving_cpu_seconds_total")],
)
def test_a_load_that_proves_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, metric: bool, message: str
) -> None:
    assert run(tmp_path, kind=kind, metric=metric, energy=False) == EXIT_NOT_STARTED
    assert message in capsys.readouterr().err
