"""Tests that the processes in which a profile is analysed end with a killed agent."""

from __future__ import annotations

import subprocess
import sys

import psutil

from support.small_configs import REPOSITORY
from support.time_limits import time_limit

AGENT = """
import os, time
from agent.profiling.profiling import end_children_with_this_process
end_children_with_this_process()
end_children_with_this_process()
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getppid(), os.getpid(), flush=True)
time.sleep(600)
"""


def test_forked_processes_end_with_the_killed_agent() -> None:
    """If an agent is killed, the processes that it forked also end. Each would keep 0.4 GB, the agent's connection and
    its shared memory.
    """
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, cwd=REPOSITORY) as agent:
        assert agent.stdout is not None
        forked = [psutil.Process(int(pid)) for pid in agent.stdout.readline().split()]
        agent.kill()
        agent.wait()
        _, left = psutil.wait_procs(forked, timeout=time_limit(10.0))
        for process in left:
            process.kill()
        assert (len(forked), left) == (2, [])
