"""Tests the parts that the command-line programs share."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from performance.bench.completion import REQUEST_TIMEOUT_S
from performance.program import client_threads
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

PROGRAM = """
import time
from performance.program import exits_with_errors

@exits_with_errors
def main():
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("servers have ended", flush=True)

raise SystemExit(main())
"""

SERVER = """
import socket, sys

with socket.create_server(("127.0.0.1", 0)) as listener:
    listener.settimeout(60)
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    print("asked", file=sys.stderr, flush=True)
    sys.stdin.read()  # never responds, but ends with the program
"""
ASKING_PROGRAM = """
import subprocess, sys
from performance.bench.speculation_main import Workload, run_round
from performance.load.endpoint import Endpoint
from performance.program import exits_with_errors

@exits_with_errors
def main():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=pipe, stdout=pipe, text=True) as server:
        try:
            endpoint = Endpoint("127.0.0.1", int(server.stdout.readline()))
            run_round(endpoint, Workload("silent", 2, "/v1/completions", [{}] * 6))
        finally:
            server.terminate()
            print("server has ended:", server.wait(), flush=True)

raise SystemExit(main())
"""


def test_sigterm_ends_the_servers_of_a_program() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        program.send_signal(signal.SIGTERM)
        output, errors = program.communicate(timeout=30)
    assert (output, errors, program.returncode) == ("servers have ended\n", "", 128 + signal.SIGTERM)


def test_sigterm_does_not_wait_for_the_responses_of_a_server() -> None:
    """The program's requests may take ``REQUEST_TIMEOUT_S``, which is longer than this test waits."""
    with subprocess.Popen(
        [sys.executable, "-c", ASKING_PROGRAM, SERVER],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stderr is not None
        try:
            assert program.stderr.readline() == "asked\n"
            program.send_signal(signal.SIGTERM)
            output, errors = program.communicate(timeout=min(time_limit(60), REQUEST_TIMEOUT_S / 2))
        finally:
            program.kill()
    ended = f"server has ended: {-signal.SIGTERM}\n"
    assert (output, errors, program.returncode) == (ended, "", 128 + signal.SIGTERM)


def test_client_threads_complete_all_requests_without_an_error() -> None:
    release, done = threading.Event(), list[int]()

    def request(number: int) -> None:
        release.wait()
        done.append(number)

    with client_threads(1) as pool:
        for number in range(3):
            pool.submit(request, number)
        release.set()
    assert done == [0, 1, 2]


def test_no_program_has_a_block_that_waits_for_all_requests() -> None:
    files = [*(REPOSITORY / "performance").rglob("*.py")]
    found = [file for file in files if "with ThreadPoolExecutor" in file.read_text(encoding="utf-8")]
    assert (len(files) > 100, found) == (True, []), "use client_threads"
