"""Runs programs of the tests in processes that are forked from one server process, which has imported MindSpore.

The import costs 2 s of CPU time, and a fork costs only some milliseconds. The programs share no state. Some settings
must be made before MindSpore is imported. Programs with these settings run through ``json_program.run_program``,
because the fork server has already imported MindSpore.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from unittest import mock

from support.small_configs import REPOSITORY
from support.time_limits import time_limit

_PRELOAD = "support.mindspore_preload"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([_PRELOAD])


class ForkedProgram:
    """A program in a forked process, with ``folder`` as its working directory. The end of a ``with`` block kills it."""

    def __init__(self, program: Path, *arguments: str, folder: Path | None = None, **variables: str | None) -> None:
        """``variables`` change environment variables of the program. None removes a variable."""
        self._command = [str(program), *arguments]
        self._outputs = tempfile.TemporaryDirectory(prefix="forked-program-")
        self._out, self._err = (Path(self._outputs.name) / name for name in ("out", "err"))
        environment: dict[str, str | None] = {**os.environ, **variables}
        target = (self._command, str(folder or Path.cwd()), environment, str(self._out), str(self._err))
        _start_server()
        self._process: ForkServerProcess = _CONTEXT.Process(target=_run, args=target, daemon=True)
        self._process.start()

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._outputs.cleanup()

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Returns the program's output and its exit code.

        Raises TimeoutExpired after ``timeout`` seconds, scaled to this machine.
        """
        timeout = time_limit(timeout)
        self._process.join(timeout)
        code, out, err = self._process.exitcode, self._read(self._out), self._read(self._err)
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout, out, err)
        return subprocess.CompletedProcess(self._command, code, out, err)

    @staticmethod
    def _read(path: Path) -> str:
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def run_forked(
    program: Path, *arguments: str, folder: Path, timeout: float = 120, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``json_program.run_program`` does."""
    with ForkedProgram(program, *arguments, folder=folder, **variables) as started:
        return started.wait(timeout)


def _start_server() -> None:
    """Starts the fork server with a ``PYTHONPATH`` on which it finds the module to preload.

    Without this path, the fork server could not import the module, and would continue without a message.
    """
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        multiprocessing.forkserver.ensure_running()


def _run(command: list[str], folder: str, environment: dict[str, str | None], out: str, err: str) -> None:
    """Makes a forked process run the program: redirects its output, sets folder and environment, and executes it."""
    assert _PRELOAD in sys.modules
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(folder)
    from support.mindspore_preload import VARIABLES

    os.environ.clear()
    os.environ.update({name: value for name, value in {**VARIABLES, **environment}.items() if value is not None})
    warnings.simplefilter("ignore")
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
