"""Provides executors over stub agents, and stops them after the test."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil
import pytest

from llm_serving.executor.agent_executor import AgentExecutor
from llm_serving.executor.agent_process import AgentProgram, bind_agent_ports
from llm_serving.model.parallel import group_ranks
from support.executor_steps import shm_entries
from support.forks import fork_server, forked_agents, forked_program
from support.small_configs import REPOSITORY, small_config
from support.time_limits import time_limit


@pytest.fixture
def make_executor(tmp_path, monkeypatch):
    """Makes and starts the executor of a replica. ``overrides`` change the config.

    Agents are forked from a process that has imported their modules (``support.forks``). With ``forks=False``, the
    executor starts them as it does in production.
    """
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}")
    before, made = shm_entries(), []
    earlier = set(psutil.Process().children(recursive=True))

    def make(*overrides, report=None, replica=0, forks=True):
        config = small_config(tmp_path, overrides)
        ranks = group_ranks(replica, config.parallel_config)
        ports = bind_agent_ports("127.0.0.1", [0] * len(ranks))
        listeners = ports.__enter__()
        program = AgentProgram("support.stub_agent")
        if forks:
            program = replace(program, launch=forked_program(fork_server("support.node_preload")).launch)
        executor = AgentExecutor(config, listeners, tmp_path, report, program=program, replica=replica)
        made.append((executor, ports))
        executor.start()
        return executor

    yield make
    children = set(psutil.Process().children(recursive=True)) - earlier
    for executor, ports in made:
        executor.close()
        ports.__exit__(None, None, None)
    # The kernel ends agents a little later than their executors, and the child processes of an agent even later. An
    # agent that was started again during the close is not among the children.
    children.update(forked_agents(os.getpid()))
    assert psutil.wait_procs(children, timeout=time_limit(10.0))[1] == []
    assert shm_entries() == before
