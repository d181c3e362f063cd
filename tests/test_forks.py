"""Tests of the processes that the fork servers of the tests start (``support.forks``)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from llm_serving.executor.agent_process import Launch, launch_python
from support import forks
from support.forks import SHARED_FOLDER, ForkedProcess, fork_server, forked_agents, forked_program
from support.processes import has_ended
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

PROGRAM = "support.process_facts"
ENVIRONMENT = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}", "LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module")
def address():
    """Returns the address of a fork server that has imported only a small module."""
    return fork_server("support.time_limits")


def facts(launch: Launch, tmp_path, *arguments: str) -> dict[str, object]:
    """Returns what a process of ``support.process_facts`` prints about itself."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"inherited")
    os.close(write_end)
    with (tmp_path / "log").open("w+b") as log:
        process = launch(PROGRAM, ["--descriptor", str(read_end), *arguments], [read_end], log.fileno(), ENVIRONMENT)
        os.close(read_end)
        code = process.wait(time_limit(20))
        log.seek(0)
        text = log.read().decode()
    [line] = [line for line in text.splitlines() if line.startswith("{")]
    assert "an error" in text.splitlines()
    return {**json.loads(line), "code": code}


def test_a_forked_process_equals_a_started_one(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        forked = facts(forked_program(address).launch, tmp_path, "--code", "7")
        started = facts(launch_python, tmp_path, "--code", "7")
    finally:
        os.sched_setaffinity(0, cores)
    assert forked == started
    assert forked["pipe"] == "inherited"
    assert forked["code"] == 7


def test_a_killed_process_has_the_signal_as_its_code_and_is_listed_until_then(address, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = forked_program(address).launch(PROGRAM, ["--sleep"], [], log.fileno(), ENVIRONMENT)
        assert [agent.pid for agent in forked_agents(os.getpid())] == [process.pid]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.0)
        process.kill()
        assert process.wait(time_limit(20)) == -signal.SIGKILL
        process.kill()  # must not send a signal to another process with the same process id
    assert forked_agents(os.getpid()) == []


def test_an_error_is_printed_and_gives_the_code_1(address, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = ForkedProcess(address, "support.no_such_module", [], {1: log.fileno(), 2: log.fileno()}, ENVIRONMENT)
        assert process.wait(time_limit(20)) == 1
    assert "No module named support.no_such_module" in (tmp_path / "log").read_text()


USER = """
import sys
from support.forks import fork_server
fork_server("support.time_limits")
print("x", end="", flush=True)
sys.stdin.read()
"""


def fork_servers(folder):
    """Returns the processes of fork servers in ``folder``, without those that have ended."""
    return [process for process in psutil.process_iter() if is_fork_server(process, folder)]


def is_fork_server(process, folder):
    try:
        return any(argument.startswith(f"{folder}/forks-") for argument in process.cmdline())
    except psutil.Error:
        return False


def test_a_fork_server_ends_with_its_last_user():
    folder = tempfile.mkdtemp()  # the path of a socket has at most 107 characters, and tmp_path may be long
    environment = {**os.environ, **ENVIRONMENT, SHARED_FOLDER: folder}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    users = [subprocess.Popen([sys.executable, "-c", USER], env=environment, **pipes) for _ in range(2)]
    for user in users:
        user.stdout.read(1)
    [server] = fork_servers(folder)
    for user in users:
        assert not has_ended(server)
        user.communicate()
    psutil.wait_procs([server], timeout=time_limit(20))
    assert fork_servers(folder) == []
    shutil.rmtree(folder)


def test_a_fork_server_removes_the_zombie_of_a_process_that_nobody_waits_for(address, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = ForkedProcess(address, PROGRAM, ["--sleep"], {1: log.fileno(), 2: log.fileno()}, ENVIRONMENT)
    number = process.pid
    process._connection.close()
    os.kill(number, signal.SIGKILL)
    deadline = time.monotonic() + time_limit(20)
    while psutil.pid_exists(number):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_goes_on_without_an_early_fork_server(request, pytestconfig, monkeypatch):
    conftest = pytestconfig.pluginmanager.get_plugin(str(REPOSITORY / "tests/conftest.py"))
    tried = []

    def fail(module):
        tried.append(module)
        raise AssertionError("the fork server does not start")

    monkeypatch.setattr(forks, "fork_server", fail)
    monkeypatch.setenv("LLM_TESTS_COMPILED", "0")
    for worker in conftest.EARLY_FORK_SERVERS:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        conftest.pytest_collection(request.session)  # does not wait, because this process has collected the tests
    assert tried == list(conftest.EARLY_FORK_SERVERS.values())
