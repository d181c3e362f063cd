"""Starts the agents of benchmarks faster."""

from __future__ import annotations

from functools import partial

import pytest

from performance.bench import engine
from support.forks import fork_server, forked_program


@pytest.fixture
def forked_engine_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``offline_engine`` fork its agents from a process that has imported their modules (``support.forks``)."""
    program = forked_program(fork_server("support.agent_preload"))
    monkeypatch.setattr(engine, "AgentExecutor", partial(engine.AgentExecutor, program=program))
