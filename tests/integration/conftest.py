"""Shares one server with default settings between the tests that need no special settings."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from llm_serving.executor import agent_executor
from support.draft_models import write_shorter_model
from support.forks import fork_server, forked_program
from support.server_process import ServerProcess, running_server

ROOMY = [
    "pa_config.num_blocks=2048",
    "model_config.decode_batch_size=[24]",
    "scheduler_config.prefix_cache=false",
    "speculative_config.method=off",
]
"""A config with blocks and batch rows for every request of the tests, so that none is preempted.

The server is the reference of other tests, so it computes every prompt completely and has no drafts.
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Provides a server of the tiny model in float32 without a prefix cache. Tests may neither stop the server nor kill
    its agent.

    Its agent has a computing thread for each core, as agents of users have. Other agents of the tests have one thread.
    The server is forked from a process that has imported its modules. test_isolation.py and test_life_and_death.py
    start servers as users do.
    """
    settings = [*ROOMY, "model_config.cpu_threads=0"]
    with running_server(tmp_path_factory.mktemp("server"), settings) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def forked_llm_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``llm_serving.LLM`` fork its agents from a process that has imported their modules (``support.forks``).

    It is for tests of answers. Tests of the start and the end of an LLM use the agents that users get.
    """
    program = forked_program(fork_server("support.agent_preload"))
    executor = partial(agent_executor.AgentExecutor, program=program)
    monkeypatch.setattr(agent_executor, "AgentExecutor", executor)


@pytest.fixture(scope="session")
def shallow_model() -> Path:
    """The tiny model with two of its five layers. It serves tests that do not need meaningful text.

    The folder is the same in all test processes. So a server starts with the program that another process has stored.
    """
    caches = Path(os.environ["XDG_CACHE_HOME"])
    folder = caches / "shallow-model"
    if not folder.exists():
        new = Path(tempfile.mkdtemp(dir=caches))
        written = write_shorter_model(new / "model", 2)
        with suppress(OSError):  # another process has just written it
            written.rename(folder)
        shutil.rmtree(new)
    return folder


@pytest.fixture(scope="session")
def shallow_server(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Provides a server with the settings of ``server`` and the shallow model, whose steps need half of the time."""
    settings = [*ROOMY, f"model_config.model_path={shallow_model}"]
    with running_server(tmp_path_factory.mktemp("shallow"), settings) as running:
        yield running
        running.wait_until_idle()
