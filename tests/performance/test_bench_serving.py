"""Tests the serving benchmark against a scripted server, and its measurement of each process's processor time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from performance.bench.cpu_share import CpuMeter, CpuShare, NoServerProcessError, find_server_pid
from performance.bench.serving_main import main, serving_parser
from performance.load.options import options_of
from support.fake_openai_server import Reply, fake_openai_server

BUSY = "while True: sum(range(1000))"


def test_the_default_load_is_the_one_for_peers() -> None:
    options = options_of(serving_parser().parse_args([]))
    assert (options.rate, options.duration, options.ignore_eos, options.token_ids) == (10.0, 30.0, True, True)
    requests = options.workload(300, seed=0)
    prompts = [request.token_ids for request in requests]
    assert {32, 64} <= {len(prompt) for prompt in prompts if prompt} <= set(range(32, 65))
    assert all(64 <= request.max_tokens <= 504 for request in requests)
    assert max(token for prompt in prompts if prompt for token in prompt) > 31_000


def test_it_reports_the_run_and_the_processor_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "result.json", tmp_path / "result.png"
    with fake_openai_server(lambda *_: Reply(gap_s=0.001)) as server:
        where = ["-P", str(server.port), "--server-pid", str(os.getpid())]
        code = main([*where, "-X", "50", "-T", "0.2", "--warmup", "0", "--json", str(result), "--png", str(picture)])
    assert code == 0
    content = json.loads(result.read_text())
    assert (content["requests"], content["failed"]) == (10, 0)
    assert set(content["cpu"]["cpu_s"]) >= {"server", "client"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "10 of 10 requests done in" in out
    assert "CPU: server" in out


def test_children_of_a_server_are_a_separate_group() -> None:
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}, '-m', 'agent'])"
    parent = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        meter = CpuMeter(parent.pid)
        meter.start()
        deadline = time.monotonic() + 20
        while (share := meter.stop()).cpu_s.get("agent", 0.0) < 0.15 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
    assert share.cpu_s["agent"] >= 0.15
    assert share.cpu_s["agent"] > share.cpu_s["server"]


def test_fractions_of_the_used_time_and_of_the_machine() -> None:
    share = CpuShare(wall_s=10.0, processors=2, cpu_s={"server": 1.0, "agent": 8.0, "client": 1.0})
    assert share.shares_of_used == {"server": 0.1, "agent": 0.8, "client": 0.1}
    assert share.shares_of_machine == {"server": 0.05, "agent": 0.4, "client": 0.05}
    assert "agent 8.0 s (80.0% of the processor time used, 40.0% of the machine)" in share.text()


def test_a_server_is_found_by_its_port() -> None:
    with fake_openai_server(lambda *_: Reply()) as server:
        assert find_server_pid(server.port) == os.getpid()
    with pytest.raises(NoServerProcessError, match="--server-pid"):
        find_server_pid(1)


def test_a_missing_server_process_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server-pid", str(2**22 + 1)]) == 2
    assert "--server-pid: there is no process" in capsys.readouterr().err
