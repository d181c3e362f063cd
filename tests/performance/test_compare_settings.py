"""Tests the comparison of several values of a setting. The scripted server answers more slowly with policy ``fcfs``."""

import json
import textwrap
from pathlib import Path

import pytest

from performance.load.client import LoadRun
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.server_process import ServerStartError, running_server
from performance.load.statistics import measure
from performance.load.variants import Measurement, main

SHORT = ["-X", "40", "-T", "0.25"]
TESTS = Path(__file__).resolve().parents[1]

STAND_IN = """
import sys
import time

sys.path.insert(0, {tests!r})
from support.fake_openai_server import Reply, fake_openai_server

policy = next(text for text in sys.argv if text.startswith("scheduler_config.policy="))
with open({record!r}, "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
first_s = 0.06 if policy.endswith("=fcfs") else 0.02
tokens = 4 if policy.endswith("=other") else 3
with fake_openai_server(lambda *_: Reply(tokens=tokens, first_s=first_s, gap_s=0.005)) as server:
    print("loading", flush=True)
    print(f"ready http://127.0.0.1:{{server.port}}", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN.format(tests=str(TESTS), record=str(tmp_path / "record")))
    return program


def test_the_ratio_of_the_mean_times_to_first_token(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    arguments = [*SHORT, "--repeats", "2", "--config", "c.yaml", "--set", "a.b=1"]
    assert main([*arguments, "--json", str(path)], stand_in) == 0
    content = json.loads(path.read_text())
    ratio = content["ratio_mean_ttft"]["fcfs/prefill_first"]
    assert 1.5 < ratio["median"] < 3.5
    assert len(ratio["per_repeat"]) == 2
    assert [run["seed"] for run in content["values"]["fcfs"]] == [0, 1]
    assert {run["requests"] for runs in content["values"].values() for run in runs} == {10}
    assert content["texts_identical"] is True
    captured = capsys.readouterr()
    assert f"mean TTFT fcfs/prefill_first: {ratio['median']:.2f} (median of" in captured.out
    assert "texts: the same under every value" in captured.out
    order = [line.split()[2].rstrip(":") for line in captured.err.splitlines() if line.startswith("repeat")]
    assert order == ["fcfs", "prefill_first", "prefill_first", "fcfs"]
    first, second, *_ = (tmp_path / "record").read_text().splitlines()
    assert first.startswith("--config c.yaml --set serving_config.server_port=0 --set serving_config.agent_ports=[0] ")
    assert first.endswith("--set scheduler_config.policy=fcfs --set a.b=1")
    assert "scheduler_config.policy=prefill_first" in second


def test_different_texts_are_exit_code_1(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--vary", "scheduler_config.policy=slo,other", *SHORT]
    assert main(arguments, stand_in) == 1
    assert "texts: NOT the same under every value" in capsys.readouterr().out
    assert main([*arguments, "--temperature", "1"], stand_in) == 0


def test_figures_from_the_servers_metrics() -> None:
    metrics = {
        'llm_serving_step_seconds_sum{kind="prefill"}': 1.5,
        'llm_serving_step_seconds_sum{kind="mixed"}': 0.25,
        'llm_serving_step_seconds_sum{kind="decode"}': 8.0,
        'llm_serving_preemptions_total{kind="swap"}': 2.0,
        'llm_serving_preemptions_total{kind="recompute"}': 3.0,
        "llm_serving_prefix_cache_query_tokens_total": 200.0,
        "llm_serving_prefix_cache_hit_tokens_total": 150.0,
    }
    figures = measure(LoadRun(LoadOptions(Endpoint("127.0.0.1", 1)), "m", [], 0.0, 0.0, 0.0, interrupted=False))
    measured = Measurement("true", 0, figures, metrics, ())
    assert (measured.preemptions, measured.found, measured.prompt_steps_s) == (5.0, 0.75, 1.75)
    assert Measurement("false", 0, figures, {}, ()).found == 0.0


def test_a_server_that_does_not_start_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "broken.py"
    program.write_text("import sys; sys.exit('config: no such key')")
    assert main([], program) == 2
    assert "server 'fcfs' ended with 1:\nconfig: no such key" in capsys.readouterr().err


def test_a_server_that_never_becomes_ready_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "slow.py"
    program.write_text(
        textwrap.dedent("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("stopped", file=sys.stderr, flush=True), sys.exit(0)))
        time.sleep(60)
        """)
    )
    with (
        pytest.raises(ServerStartError, match=r"not ready within 1\.5 s"),
        running_server("slow", [], tmp_path / "err", 1.5, program),
    ):
        pass
    assert (tmp_path / "err").read_text() == "stopped\n"
