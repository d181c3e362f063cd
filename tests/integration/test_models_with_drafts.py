"""Tests models with a draft model or a head that sleep, wake and reload, and whose blocks come from the SSD: tokens,
memory and drafts are as before.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.draft_models import draft_settings
from support.head_models import STEP, write_heads
from support.processes import has_ended
from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

SIZES = ["pa_config.num_blocks=160", "model_config.decode_batch_size=[8]", "serving_config.canary_interval_s=0"]
LENGTH = 35
MAIN, SECOND = "llama_tiny", "second"


def settings_of(method: str, folder: Path) -> list[str]:
    """Returns the settings of a model and its drafts. Models with a head count, so that all their drafts are right."""
    if method == "draft":
        return draft_settings(folder, 2)
    model, head = write_heads(method, folder, counting=True)
    settings = [f"model_config.model_path={model}", f"speculative_config.method={method}"]
    settings += [] if head is None else [f"speculative_config.model={head}"]
    return [*settings, "speculative_config.always=true", "speculative_config.max_draft_tokens=4"]


def prompts_of(method: str) -> list[list[int]]:
    if method == "draft":
        return [[1, 300 + index, 600, 700 + index] * 5 for index in range(3)]
    return [list(range(5 + index, 5 + index + STEP * 20, STEP)) for index in range(3)]


def tokens(server: ServerProcess, model: str, prompt: list[int]) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    reply = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert "choices" in reply, reply
    found: list[int] = reply["choices"][0]["token_ids"]
    return found


def assert_same_with_drafts(server: ServerProcess, model: str, prompts: list[list[int]], expected: Any) -> None:
    """Checks the tokens of a model, and that drafts of its draft model or head were right meanwhile."""
    accepted, seconds = server.counter("accepted_draft_tokens"), server.counter("draft_model_seconds")
    assert [tokens(server, model, prompt) for prompt in prompts] == expected
    assert server.counter("accepted_draft_tokens") > accepted + len(prompts) * LENGTH / 10
    assert server.counter("draft_model_seconds") > seconds


def num_segments(pid: int) -> int:
    """Returns the number of shared-memory segments that a server has mapped. The segments have no names any more."""
    return Path(f"/proc/{pid}/maps").read_text().count("/llm-serving-")


def command(server: ServerProcess, name: str, **body: object) -> dict[str, Any]:
    reply: dict[str, Any] = server.post(f"/v1/models/{SECOND}/{name}", body)
    return reply


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["draft", "eagle", "mtp"])
def test_models_with_drafts_sleep_wake_and_reload(method: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    prompts, settings = prompts_of(method), settings_of(method, tmp_path)
    entry = {"name": SECOND, "config": "llama_tiny_cpu.yaml", "set": [*SIZES, *settings]}
    if method == "draft":
        plain: ServerProcess = request.getfixturevalue("server")
        expected = [tokens(plain, MAIN, prompt) for prompt in prompts]
    else:
        expected = [list(range(prompt[-1] + STEP, prompt[-1] + (LENGTH + 1) * STEP, STEP)) for prompt in prompts]
    other = tmp_path / "other"
    write_model(FAMILY_VARIANTS["qwen2_tied"], other)
    overrides = [f"model_config.model_name={MAIN}", f"models_config.models={json.dumps([entry])}", *settings]
    with running_server(tmp_path / "server", overrides) as server:
        segments = num_segments(server.pid)
        assert_same_with_drafts(server, MAIN, prompts, expected)
        assert_same_with_drafts(server, SECOND, prompts, expected)
        assert num_segments(server.pid) > segments
        [agent] = [each for each in server.agents() if each.pid != main_agent(server)]
        reply = command(server, "sleep")
        assert (reply["state"], reply["memory_bytes"]) == ("sleeping", 0)
        assert has_ended(agent)
        assert num_segments(server.pid) == segments
        assert_same_with_drafts(server, SECOND, prompts, expected)  # the first request wakes the model
        assert command(server, "reload")["state"] == "ready"
        assert_same_with_drafts(server, SECOND, prompts, expected)
        assert command(server, "reload", drain_first=True)["state"] == "ready"
        assert_same_with_drafts(server, SECOND, prompts, expected)
        refused = command(server, "reload", model_path=str(other))
        assert refused["status"] == 409, "the draft model does not fit the other model"
        assert_same_with_drafts(server, SECOND, prompts, expected)
        first = main_agent(server)
        assert server.post(f"/v1/models/{MAIN}/reload", {})["state"] == "ready"
        assert main_agent(server) != first
        assert_same_with_drafts(server, MAIN, prompts, expected)


def main_agent(server: ServerProcess) -> int:
    """Returns the process id of the main model's agent."""
    [agent] = server.get("/server_info")["engine"]["agents"]
    pid: int = agent["pid"]
    return pid


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["draft", "eagle", "mtp"])
def test_blocks_from_the_ssd_change_no_token_with_drafts(method: str, tmp_path: Path) -> None:
    """The draft model or head has not computed the keys of these blocks."""
    prompts, settings = prompts_of(method), settings_of(method, tmp_path)
    settings += ["kv_tier_config.host_blocks=64", f"kv_tier_config.ssd_folder={tmp_path / 'tier'}"]
    settings += ["kv_tier_config.loads=always", f"model_config.model_name={MAIN}"]
    found = []
    for number in range(2):
        with running_server(tmp_path / f"server{number}", settings) as server:
            wait_for_blocks(server, number * len(prompts))
            found.append([tokens(server, MAIN, prompt) for prompt in prompts])
            tiers = wait_for_blocks(server, len(prompts))
            assert tiers["hits"]["ssd"] == number * len(prompts)
            assert server.counter("draft_model_seconds") > 0
    assert found[0] == found[1]


def wait_for_blocks(server: ServerProcess, number: int) -> dict[str, Any]:
    """Waits until the folder has a number of blocks. Returns the state of the KV tiers."""
    deadline = time.monotonic() + time_limit(30)
    while True:
        tiers: dict[str, Any] = server.get("/server_info")["engine"]["replicas"][0]["kv_tiers"]
        if tiers["disk"]["blocks"] >= number:
            return tiers
        assert time.monotonic() < deadline, tiers
        time.sleep(0.02)
