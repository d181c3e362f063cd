"""Starts a server for a benchmark."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from performance.load.endpoint import Endpoint, parse_endpoint
from performance.program import LoadTestError

START_SERVER = Path(__file__).resolve().parent.parent.parent / "start_server.py"
READY = "ready "
STOP_TIMEOUT_S = 20.0
"""Maximum seconds until a server has ended."""
POLL_S = 0.5
"""Seconds between two checks whether a server has started."""
SHOWN_LINES = 20
"""Number of last lines of a failed server's output that the error shows."""


class ServerStartError(LoadTestError):
    """Raised if the server ended, or did not start in time."""


@contextmanager
def configured_server(
    name: str, config: str, settings: Sequence[str], folder: Path, timeout_s: float, program: Path = START_SERVER
) -> Iterator[Endpoint]:
    """Starts a server of ``config`` on free ports, with its log in ``folder``. Yields its address.

    ``settings`` have the form KEY=VALUE. If a key occurs several times, the last value counts. Raises
    ``ServerStartError`` if the server ends or does not start in time.
    """
    own = ["serving_config.server_port=0", "serving_config.agent_ports=[0]", f"log_config.path={folder}/server.log"]
    arguments = ["--config", config, *(part for setting in [*own, *settings] for part in ("--set", setting))]
    with running_server(name, arguments, folder / "stderr", timeout_s, program) as url:
        yield parse_endpoint(url)


@contextmanager
def running_server(
    name: str, arguments: Sequence[str], output: Path, timeout_s: float, program: Path = START_SERVER
) -> Iterator[str]:
    """Starts the server ``program``, yields the URL that it prints when it is ready, and stops it at the end.

    The program's standard error goes to the file ``output``. Raises ``ServerStartError`` with the last lines of this
    file if the server ends or does not start in time.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C must reach only this process, which then stops the server
        )
        try:
            yield _wait_until_ready(name, process, output, timeout_s)
        finally:
            _stop(process)


def _wait_until_ready(name: str, process: subprocess.Popen[str], output: Path, timeout_s: float) -> str:
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            line = lines.get(timeout=POLL_S)
        except queue.Empty:
            continue
        if line is None:
            raise ServerStartError(f"server {name!r} ended with {process.wait()}:\n{_last_lines(output)}")
        if line.startswith(READY):
            return line[len(READY) :].strip()
    raise ServerStartError(f"server {name!r} was not ready within {timeout_s:g} s:\n{_last_lines(output)}")


def _read_lines(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    """Reads the server's output in a thread until the server ends, because a full pipe would block the server."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _last_lines(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
