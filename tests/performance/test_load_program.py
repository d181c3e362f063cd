"""Tests the load test as a program: its files, its table and its exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from performance.load.main import main
from support.fake_openai_server import Reply, fake_openai_server
from support.time_limits import time_limit

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "performance" / "test_serving_performance.py"


def test_success_writes_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai_server(lambda *_: Reply(gap_s=0.005)) as server:
        code = main(["-X", "50", "-P", str(server.port), "-O", str(tmp_path), "-T", "0.4", "--seed", "3"])
    assert code == 0
    out = capsys.readouterr().out
    assert "All Tasks Done; Exec Time is " in out
    content = json.loads((tmp_path / "serving_performance_X50_T0.4_seed3.json").read_text())
    assert (content["requests"], content["failed"], len(content["per_request"])) == (20, 0, 20)
    assert content["output_tokens"] == 80
    assert set(content) >= {"total_time_s", "output_tokens_per_s", "qps", "tbt_ms", "normalized_latency_ms", "goodput"}
    for name in ("ttft_ms", "tpot_ms", "e2e_s"):
        assert all(content[name][figure] > 0 for figure in ("mean", "p50", "p90", "p99"))
    assert (tmp_path / "serving_performance_X50_T0.4_seed3.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_request_makes_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "result.json"
    with fake_openai_server(lambda number, _: Reply("status" if number == 4 else "ok")) as server:
        load = ["-X", "50", "-P", str(server.port), "-T", "0.2", "--no-plot"]
        code = main([*load, "-O", str(tmp_path), "--json", str(path)])
    assert code == 1
    content = json.loads(path.read_text())
    assert content == json.loads((tmp_path / "serving_performance_X50_T0.2_seed0.json").read_text())
    assert (content["requests"], content["failed"], content["failures"]) == (10, 1, {"http 429": 1})
    assert [one["failure"] for one in content["per_request"]].count("http 429") == 1
    assert "failed: http 429: 1\n    come back later" in capsys.readouterr().out


def test_no_server_is_exit_code_2_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-P", "1", "--no-plot"]) == 2
    assert capsys.readouterr().err == (
        "error: no server at http://127.0.0.1:1: connection refused. Start one with 'make serve', or give its address "
        "with -P PORT or --base-url URL.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-X", "0.01", "-T", "1"], "makes no request"),
        (["--token-ids", "--api", "openai-chat"], "takes text and no token ids"),
        (["--token-ids", "--vocab-size", "5"], "token ids start at 10"),
        (["--api", "chat", "--ignore-eos"], "supports neither --ignore-eos"),
        (["--base-url", "ftp://x"], "expected http://HOST:PORT"),
        (["--dataset", "/no/such/file"], "cannot read /no/such/file"),
        (["-O", "/proc/no/such"], "cannot create the folder /proc/no/such"),
        (["--warmup", "-1"], "the minimum is 0"),
    ],
)
def test_wrong_options_are_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-O", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-X", "0"], ["-T", "inf"], ["--prompt-len", "5:2"], ["--output-len", "x"]])
def test_options_that_argparse_rejects(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_it_runs_as_a_program_from_anywhere_and_reports_when_interrupted(tmp_path: Path) -> None:
    with fake_openai_server(lambda *_: Reply(tokens=3, gap_s=0.05)) as server:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "-X", "20", "-T", "60", "-P", str(server.port), "--no-plot"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 10
        while len(server.requests) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=time_limit(10))
    assert process.returncode == 130, err
    assert "note: interrupted after" in out
    content = json.loads((tmp_path / "serving_performance_X20_T60_seed0.json").read_text())
    assert content["interrupted"] is True
    assert 5 <= content["requests"] < 100


def test_pytest_does_not_collect_the_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "performance"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no tests collected" in result.stdout
    assert result.returncode == 5
