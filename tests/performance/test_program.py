"""Tests the parts that the command-line programs share."""

from __future__ import annotations

import signal
import subprocess
import sys

from support.small_configs import REPOSITORY

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


def test_sigterm_ends_the_servers_of_a_program() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        program.send_signal(signal.SIGTERM)
        output, errors = program.communicate(timeout=30)
    assert (output, errors, program.returncode) == ("servers have ended\n", "", 128 + signal.SIGTERM)
