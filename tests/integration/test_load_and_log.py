"""Tests that the load test and the log analysis, run as programs, report the same requests."""

from __future__ import annotations

import json
import subprocess
import sys

from support.server_process import running_server
from support.small_configs import REPOSITORY
from support.time_limits import time_limit


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=time_limit(120), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_log_matches_the_client(tmp_path):
    with running_server(tmp_path / "server", ["pa_config.num_blocks=1024"]) as server:
        port = server.url.rsplit(":", 1)[1]
        program = REPOSITORY / "performance/test_serving_performance.py"
        client_json = tmp_path / "client.json"
        printed = run(program, "-X", 10, "-P", port, "-O", tmp_path, "-T", 3, "--seed", 1, "--json", client_json)
        server.wait_until_idle()
        log_json, html = tmp_path / "log.json", tmp_path / "report.html"
        run(REPOSITORY / "tools/analyze_log.py", server.log, "--json", log_json, "--html", html)
    client, log = json.loads(client_json.read_text()), json.loads(log_json.read_text())
    assert "All Tasks Done; Exec Time is" in printed
    assert (client["requests"], client["failed"]) == (30, 0)
    assert log["requests"] == 30
    assert set(log["finish_reasons"]) <= {"stop", "length"}
    assert sum(log["finish_reasons"].values()) == 30
    tokens = [request["prompt_tokens"] + request["output_tokens"] for request in client["per_request"]]
    assert log["max_token_len"] == max(tokens)
    for key in ("ttft_ms", "tpot_ms", "e2e_s"):
        assert set(log[key]) >= {"mean", "p50", "p90", "p99"}
        assert set(client[key]) >= {"mean", "p50", "p90", "p99"}
    assert html.read_text().startswith("<!")
    assert list(tmp_path.glob("*.png"))
