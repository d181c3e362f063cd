"""Runs programs of the tests in processes that are forked from one that has imported MindSpore (``support.forks``).

The import costs 2 s of CPU time, and a fork costs only some milliseconds. The programs share no state. Some settings
must be made before MindSpore is imported. Programs with these settings run through ``json_program.run_program``,
because the fork server has already imported MindSpore.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from support.forks import ForkedProcess, fork_server
from support.time_limits import time_limit


class ForkedProgram:
    """A program in a forked process, with ``folder`` as its working directory. The end of a ``with`` block kills it."""

    def __init__(
        self,
        program: Path,
        *arguments: str,
        folder: Path | None = None,
        preload: str = "support.agent_preload",
        **variables: str | None,
    ) -> None:
        """Starts the program. ``variables`` change its environment variables, and None removes a variable.

        The process is forked from one that has imported the module ``preload``.
        """
        self._command = [str(program), *arguments]
        self._outputs = tempfile.TemporaryDirectory(prefix="forked-program-")
        self._out, self._err = (Path(self._outputs.name) / name for name in ("out", "err"))
        environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = ForkedProcess(
                fork_server(preload),
                "support.run_file",
                self._command,
                {1: out.fileno(), 2: err.fileno()},
                environment,
                folder=folder,
            )

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._outputs.cleanup()

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Returns the program's output and its exit code.

        Raises TimeoutExpired after ``timeout`` seconds, scaled to this machine.
        """
        timeout = time_limit(timeout)
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            outputs = self._read(self._out), self._read(self._err)
            raise subprocess.TimeoutExpired(self._command, timeout, *outputs) from error
        out, err = self._read(self._out), self._read(self._err)
        return subprocess.CompletedProcess(self._command, code, out, err)

    @staticmethod
    def _read(path: Path) -> str:
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def run_forked(
    program: Path,
    *arguments: str,
    folder: Path,
    timeout: float = 120,
    preload: str = "support.agent_preload",
    **variables: str | None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as ``json_program.run_program`` does."""
    with ForkedProgram(program, *arguments, folder=folder, preload=preload, **variables) as started:
        return started.wait(timeout)
