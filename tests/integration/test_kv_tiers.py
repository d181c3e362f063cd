"""Tests KV tiers of real servers. Blocks on the SSD survive kill -9, and a server with other weights does not use
them. Servers that share a folder do not use blocks of a server that has failed a self-check.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_serving.kvstore.records import decode_header, encode_record
from support.server_process import ServerProcess, running_server
from support.small_configs import REPOSITORY, TINY_LLAMA
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


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + time_limit(30.0)
    while not condition():
        assert time.monotonic() < deadline, f"not seen: {what}"
        time.sleep(0.02)


def with_wrong_values(record: bytes) -> bytes:
    """Returns a record of the same block and writer with other values and right checksums."""
    header = decode_header(record)
    assert header is not None
    content = record[header.content_start :]
    half = len(content) // 2
    return encode_record(header.namespace, header.key, header.generation, content[half:] + content[:half])


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


def test_servers_do_not_use_blocks_of_a_server_that_fails_a_self_check(tmp_path, monkeypatch):
    """Three servers share a folder. The first one marks its blocks. The second one has read them before, and computes
    its next request. The third one finds the files again, as if the first one had died before it removed them.
    """
    settings = ["kv_tier_config.host_blocks=64", f"kv_tier_config.shared_folder={tmp_path / 'shared'}"]
    settings += ["kv_tier_config.loads=always"]
    fault = tmp_path / "fault"
    with monkeypatch.context() as faulty:
        faulty.setenv("PYTHONPATH", str(REPOSITORY / "tests/support/faulty_agent"))
        faulty.setenv("FAULTY_AGENT_FILE", str(fault))
        faulty.setenv("FAULTY_AGENT", "other_tokens")
        (tmp_path / "first").mkdir()
        checks = ["serving_config.canary_interval_s=1", "serving_config.row_check_interval=0"]
        first = ServerProcess(tmp_path / "first", [*settings, *checks])
    try:
        first.wait_ready()
        expected = first.post("/v1/completions", QUESTION)["choices"]
        wait_for(first, "shared_blocks", 12)
        with running_server(tmp_path / "second", settings) as second, running_server(
            tmp_path / "third", settings
        ) as third:
            for server in (second, third):
                wait_for(server, "shared_blocks", 12)
            assert second.post("/v1/completions", QUESTION)["choices"] == expected
            assert metric(second, 'hit_blocks_total{tier="shared"}') == 12
            records = {path: path.read_bytes() for path in (tmp_path / "shared").rglob("*.kv")}

            fault.touch()
            wait_until(lambda: first.events("self_check_failed"), "the failed self-check of the first server")
            fault.unlink()
            wait_until(lambda: not any(map(Path.exists, records)), "the removal of the blocks")
            wait_until(
                lambda: any("distrusted" in event["message"] for event in second.events("kv_tiers")),
                "the doubt of the second server",
            )
            for path, record in records.items():
                path.write_bytes(with_wrong_values(record))

            computed = second.get("/server_info")["engine"]["prefix_hit_tokens"]
            for server in (second, third):
                assert server.post("/v1/completions", QUESTION)["choices"] == expected
            assert second.get("/server_info")["engine"]["prefix_hit_tokens"] == computed
            assert metric(second, 'hit_blocks_total{tier="shared"}') == 12
            assert metric(third, 'hit_blocks_total{tier="shared"}') == 0
            assert metric(third, "shared_rejected_records_total") >= 1
            assert third.events("kv_tiers") == [], "it has read no block of the first server"
    finally:
        first.stop()


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
