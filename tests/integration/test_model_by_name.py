"""Tests a model that is given by its name, from the download to the answer.

The processes are real, the hub is on loopback, and the files are in Hugging Face's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.hub_server import REPOSITORY as MODEL
from support.hub_server import folder_files, hub_server
from support.server_process import ServerProcess
from support.small_configs import REPOSITORY, TINY_LLAMA
from support.time_limits import time_limit


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm_serving", "plan", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=time_limit(60))


def test_a_name_is_downloaded_served_and_found_again_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The downloaded files are links into another folder of the cache. A confined agent can still read them."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub_server(folder_files(TINY_LLAMA)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        server = ServerProcess(tmp_path, program=("-m", "llm_serving", "serve", "--model", MODEL))
        try:
            server.wait_ready()
            body = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "temperature": 0}
            answer = server.post("/v1/chat/completions", body)
            assert answer["choices"][0]["message"]["content"] == "The capital of Japan is Tokyo."
            assert answer["model"] == "Tiny.Model"
        finally:
            server.stop()
        assert "model.safetensors" in hub.downloaded()
        assert "training.json" not in hub.downloaded()
        requests = hub.requests
        done = plan("--model", MODEL, "--offline")
        assert done.returncode == 0, done.stderr
        assert "\nmodel      Tiny.Model, " in done.stdout
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert plan("--model", f"hf:{MODEL}").returncode == 0
        assert hub.requests == requests
    done = plan("--model", "Tiny-Org/Other")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: hf:Tiny-Org/Other is not in the cache ")
    assert os.environ["HF_HOME"] in done.stderr


@pytest.mark.sweep
def test_a_draft_model_is_downloaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    draft = ("--config", "llama_tiny_cpu.yaml", "--set", "speculative_config.method=draft", "--set")
    with hub_server(folder_files(TINY_LLAMA)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = plan(*draft, f"speculative_config.model={MODEL}", "--offline")
        assert (done.returncode, hub.requests) == (2, 0)
        assert done.stderr.startswith(f"error: hf:{MODEL} is not in the cache ")
        done = plan(*draft, f"speculative_config.model={MODEL}")
        assert done.returncode == 0, done.stderr
        assert "draft model: weights" in done.stdout
        assert "model.safetensors" in hub.downloaded()
        downloads = len(hub.downloads)
        assert plan(*draft, f"speculative_config.model=hf:{MODEL}@main").returncode == 0
        assert len(hub.downloads) == downloads
        done = plan(*draft, f"speculative_config.model=hf:{MODEL}@other")
        assert f"hf:{MODEL}@other: the repository has no revision 'other'" in done.stderr
        requests = hub.requests
        assert plan(*draft, f"speculative_config.model={MODEL}", "--offline").returncode == 0
        assert hub.requests == requests
        done = plan(*draft, "speculative_config.model=hf:wrong")
        assert done.stderr.startswith("error: speculative_config.model hf:wrong: expected hf:OWNER/NAME")
