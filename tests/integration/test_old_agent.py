"""Tests the start of a server while an agent of a killed server still runs.

The two processes share no memory, and the old agent ends.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from support.server_process import ServerProcess, running_server, shm_entries
from support.time_limits import time_limit

QUESTION = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "return_token_ids": True}


def mapped_segments(pid: int) -> set[str]:
    """Returns the shared-memory segments of servers that a process maps, each as its inode number and name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {" ".join(line.split()[4:6]) for line in lines if "/dev/shm/llm-serving-" in line}


def test_a_server_shares_nothing_with_an_agent_of_a_killed_server(tmp_path, record_property):
    (tmp_path / "old").mkdir()
    old = ServerProcess(tmp_path / "old").wait_ready()
    expected = old.post("/v1/completions", QUESTION)["choices"]
    [agent] = old.agents()
    os.kill(agent.pid, signal.SIGSTOP)  # the stopped agent does not notice that its server has ended
    while agent.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    os.kill(old.pid, signal.SIGKILL)
    old._process.wait()
    try:
        port = old.url.rsplit(":", 1)[1]
        with running_server(tmp_path / "new", [f"serving_config.server_port={port}"]) as new:
            assert new.post("/v1/completions", QUESTION)["choices"] == expected
            held = mapped_segments(agent.pid)
            assert held, "the old agent maps the memory of its server"
            [successor] = new.agents()
            shared = held & (mapped_segments(new.pid) | mapped_segments(successor.pid))
            record_property("shared_segments", f"{len(shared)} of {len(held)}")
            assert shared == set()
            os.kill(agent.pid, signal.SIGCONT)
            assert psutil.wait_procs([agent], timeout=time_limit(5.0))[1] == []
            assert new.post("/v1/completions", QUESTION)["choices"] == expected
    finally:
        if agent.is_running():
            agent.kill()
        old.stop()
    assert shm_entries(old.pid) == set()
