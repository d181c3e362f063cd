"""Tests that the programs in ``tests/long`` end all processes that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.long_program import STARTED_BY, started_by
from support.processes import arguments_of, running
from support.server_process import SHM_DIRECTORY
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

PROGRAMS = [path for path in (REPOSITORY / "tests" / "long").glob("*.py") if "__main__" in path.read_text()]
ORPHAN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())  # one write, as another process writes to the same pipe
time.sleep(600)
"""
CHILD = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {ORPHAN!r}], start_new_session=True)
"""
PROGRAM = f"""
import multiprocessing, os, subprocess, sys, time
from support.long_program import run_program

def main():
    subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)  # leaves a process with another parent
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    forked.start()
    try:
        os.write(1, b"%d\\n" % forked.pid)  # the test sends its signal after this line
        time.sleep(600)
    finally:
        print("ended in order", flush=True)

sys.exit(run_program(main))
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes_of_a_program(number: signal.Signals) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert program.stdout is not None
    pids = [int(program.stdout.readline()) for _ in range(2)]
    memory = SHM_DIRECTORY / f"llm-serving-{pids[0]}xtest"
    memory.touch()
    try:
        assert running(pids) == pids
        program.send_signal(number)
        output, _ = program.communicate(timeout=time_limit(20))
        assert (program.returncode, output) == (128 + number, "ended in order\n")
        assert running(pids) == []
        assert not memory.exists()
    finally:
        memory.unlink(missing_ok=True)
        for pid in running([program.pid, *pids]):
            psutil.Process(pid).kill()


def test_every_program_ends_its_processes() -> None:
    assert len(PROGRAMS) > 10
    others = [path.name for path in PROGRAMS if "\n    sys.exit(run_program(main))\n" not in path.read_text()]
    assert others == []


def is_agent(process: psutil.Process) -> bool:
    """Returns True for the process of an agent. A forked agent has the arguments of its fork server, but its own name.
    """
    return "agent" in arguments_of(process) or process.name().startswith("agent-")


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arguments", [("chaos.py",), ("cluster_chaos.py", "--nodes", "1")])
def test_a_signal_ends_servers_and_nodes(arguments: tuple[str, ...], tmp_path: Path) -> None:
    name = f"/{tmp_path}/"
    program = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "tests" / "long" / arguments[0]), *arguments[1:]],
        env={**os.environ, STARTED_BY: name},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + time_limit(120)
        while not any(is_agent(process) for process in started_by(name)):
            assert time.monotonic() < deadline, "no agent was started"
            time.sleep(0.2)
        processes = started_by(name)
        program.send_signal(signal.SIGTERM)
        assert program.wait(time_limit(60)) == 128 + signal.SIGTERM
        assert started_by(name) == []
        assert not [path for process in processes for path in SHM_DIRECTORY.glob(f"llm-serving-{process.pid}x*")]
    finally:
        for process in started_by(name):
            process.kill()
        program.wait()
