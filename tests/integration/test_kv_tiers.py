"""Tests KV tiers of a real server. Blocks on the SSD survive kill -9, and a server with other weights does not use
them.
"""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from support.server_process import ServerProcess, running_server
from support.small_configs import TINY_LLAMA
from support.time_limits import time_limit

PROMPT = [3 + place * 7 % 400 for place in range(200)]
QUESTION = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "return_token_ids": True}


def metric(server: ServerProcess, name: str) -> float:
    start = f"llm_serving_kv_tier_{name}"
    lines = [line for line in server.get_text("/metrics").splitlines() if line.startswith(start)]
    assert len(lines) == 1, f"{name}: {lines}"
    return float(lines[0].rsplit(" ", 1)[1])


def wait_for(server: ServerProcess, name: str, value: float) -> None:
    deadline = time.monotonic() + time_limit(20.0)
    while metric(server, name) < value:
        reason = f"{name} is {metric(server, name)}, not {value}; {server.events('kv_tiers')}"
        assert time.monotonic() < deadline, reason
        time.sleep(0.02)


@pytest.fixture
def settings(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, model)
    return [
        f"model_config.model_path={model}",
        "kv_tier_config.host_blocks=64",
        f"kv_tier_config.ssd_folder={tmp_path / 'tier'}",
        "kv_tier_config.loads=always",
    ]


def test_two_machines_share_a_folder(tmp_path):
    """The second server has the same weights at another path, as another machine does."""
    shared = ["kv_tier_config.host_blocks=64", f"kv_tier_config.shared_folder={tmp_path / 'shared'}"]
    places = [TINY_LLAMA, tmp_path / "copy"]
    shutil.copytree(TINY_LLAMA, places[1])
    answers = []
    for number, place in enumerate(places):
        settings = [*shared, "kv_tier_config.loads=always", f"model_config.model_path={place}"]
        with running_server(tmp_path / str(number), settings) as server:
            wait_for(server, "shared_blocks", 12 * number)
            answers.append(server.post("/v1/completions", QUESTION)["choices"])
            assert metric(server, 'hit_blocks_total{tier="shared"}') == 12 * number
            wait_for(server, "shared_blocks", 12)
    assert answers[0] == answers[1], "tokens and bits of log-probabilities"


def test_blocks_survive_kill_9_and_other_weights_find_none(tmp_path, settings):
    (tmp_path / "first").mkdir()
    first = ServerProcess(tmp_path / "first", settings).wait_ready()
    try:
        expected = first.post("/v1/completions", QUESTION)["choices"]
        wait_for(first, "ssd_written_blocks_total", 12)
        for number in range(4):  # the server is killed while it writes the blocks of these requests
            first.post("/v1/completions", {"prompt": [9 + number, *PROMPT], "max_tokens": 1})
        os.kill(first.pid, signal.SIGKILL)
        first._process.wait()
    finally:
        first.stop()

    with running_server(tmp_path / "second", settings) as second:
        wait_for(second, "ssd_blocks", 12)
        assert second.post("/v1/completions", QUESTION)["choices"] == expected, "tokens and bits of log-probabilities"
        assert metric(second, 'hit_blocks_total{tier="ssd"}') == 12
        assert second.get("/server_info")["engine"]["prefix_hit_tokens"] >= 12 * 16

    weights = tmp_path / "model" / "model.safetensors"
    found = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # flips the lowest bit of a weight and keeps the size; the next lines restore the time
    weights.write_bytes(data)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    with running_server(tmp_path / "third", settings) as third:
        third.post("/v1/completions", QUESTION)
        wait_for(third, "ssd_written_blocks_total", 12)
        assert metric(third, 'hit_blocks_total{tier="ssd"}') == 0
