"""Tests that a flight recording replays even if an agent was killed during the run and the server at its end."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from llm_serving.flight.history import arrivals, completed_steps
from llm_serving.flight.reader import AgentLost, read_recording
from support.server_process import ServerProcess
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

SYSTEM = "You are a storyteller who never tires of telling stories about rabbits and their friends in the wood. "


def ask(server, number):
    body = {
        "prompt": SYSTEM + f"Story {number}:",
        "max_tokens": 60,
        "temperature": 0,
        "stop": [" the"] if number % 3 else [],
    }
    while "error" in (answer := server.post("/v1/completions", body)):
        # The client repeats the request until a new agent is ready.
        assert answer["error"]["code"] == "recovering", answer
        time.sleep(0.1)
    return answer


@pytest.mark.parametrize(
    "settings",
    [
        ["scheduler_config.policy=chunked", "scheduler_config.prefix_cache=true"],
        pytest.param([], marks=pytest.mark.sweep),
    ],
)
def test_a_servers_recording_replays_though_it_was_killed(tmp_path, settings):
    server = ServerProcess(tmp_path, settings).wait_ready()
    [agent] = server.agents()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, server, number) for number in range(60)]
        concurrent.futures.wait(answers, return_when=concurrent.futures.FIRST_COMPLETED)
        agent.kill()  # most requests then complete on the agent that replaces this one
        texts = [answer.result()["choices"][0]["text"] for answer in answers]
        # Now all records are written. The server is killed next, under load, and may lose the records of the last 50
        # ms.
        server.wait_until_idle()
        last = [pool.submit(ask, server, number) for number in range(4)]
        [agent] = server.agents()
        os.kill(server.pid, signal.SIGKILL)
        concurrent.futures.wait(last)
    _, alive = psutil.wait_procs([agent], timeout=time_limit(5.0))
    assert alive == []
    assert server.stop() == -signal.SIGKILL
    assert len(texts) == 60

    (stretch,) = read_recording(tmp_path / "flight")
    assert any(isinstance(event, AgentLost) for event in stretch.events())
    ended = [arrival for arrival in arrivals(stretch) if arrival.end is not None]
    assert len(ended) >= 60
    assert {"stop", "length"} <= {arrival.end for arrival in ended}
    assert all(completed.graph_us > 0 for _, _, completed in completed_steps(stretch))
    replayed = run_replay(tmp_path / "flight", "--html", tmp_path / "t.html")
    assert replayed.returncode == 0, replayed.stdout
    assert re.match(r"identical, \d+ steps\n", replayed.stdout)
    assert run_replay(tmp_path / "flight", "--policy", "fcfs").returncode == 0


def run_replay(*arguments):
    command = [sys.executable, str(REPOSITORY / "tools" / "replay.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=time_limit(60), check=False)
