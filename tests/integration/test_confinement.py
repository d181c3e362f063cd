"""Tests that the kernel confines every thread of a real agent, and that the server reports this."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.confinement.landlock import landlock_abi
from agent.confinement.seccomp import can_filter


def thread_states(pid: int) -> list[dict[str, str]]:
    """Returns what the kernel reports in /proc on each thread of a process, by field."""
    tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return [dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line) for text in tasks]


@pytest.mark.skipif(landlock_abi() == 0 or not can_filter(), reason="this machine cannot confine an agent fully")
def test_every_thread_of_an_agent_is_confined_and_the_server_says_so(server):
    [agent] = server.agents()
    threads = thread_states(agent.pid)
    assert len(threads) > 3
    assert {(each["NoNewPrivs"].strip(), each["Seccomp"].strip()) for each in threads} == {("1", "2")}
    [ready] = server.events("agent_ready")
    assert ready["summary"]["confinement"] == f"Landlock {landlock_abi()} (files, TCP, signals), seccomp"
    [status] = server.get("/server_info")["engine"]["agents"]
    assert status["summary"]["confinement"] == ready["summary"]["confinement"]
