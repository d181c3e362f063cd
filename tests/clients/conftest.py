"""Starts one server of the tiny model for the tests of client libraries.

These tests run in an environment of their own (``make test-clients``), because the libraries need many packages. The
variable ``LLM_SERVING_PYTHON`` names the Python of the server.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("serving_config.server_port=0", "serving_config.agent_ports=[0]", "pa_config.num_blocks=1024",
            "model_config.decode_batch_size=[8]", "serving_config.canary_interval_s=0")  # fmt: skip
PYTHON = os.environ.get("LLM_SERVING_PYTHON")

if PYTHON is None:  # not started by ``make test-clients``, so the client libraries are not installed
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Address of the server, without a path."""
    folder = tmp_path_factory.mktemp("server")
    words = [word for setting in (*SETTINGS, f"log_config.path={folder / 'server.log'}") for word in ("--set", setting)]
    command = [PYTHON, str(ROOT / "start_server.py"), "--config", "llama_tiny_cpu.yaml", *words]
    with (folder / "errors.txt").open("wb") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("ready http://"), (folder / "errors.txt").read_text()
        yield line.split()[1]
    finally:
        server.terminate()
        assert server.wait(60) == 0
