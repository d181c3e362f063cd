"""Defines ``Host``, through which all checks see the machine: a root folder, an environment, and a command runner.

With another ``Host``, a test can simulate any machine.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_TIMEOUT_S = 30.0
"""Default of the maximum run time of a command, in seconds."""
URL_TIMEOUT_S = 5.0
"""Maximum seconds to wait for a server's response."""
_MAX_TEXT_BYTES = 1024 * 1024
"""Maximum length of a server's response or of a file that is read. The rest is ignored."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command. ``code`` is None if the command did not complete; ``failure`` then has the reason."""

    code: int | None
    stdout: str = ""
    stderr: str = ""
    failure: str = ""

    @property
    def succeeded(self) -> bool:
        return self.code == 0

    @property
    def last_words(self) -> str:
        """Describes the end of the command: a signal or failure if there was one, and the last line of its output."""
        lines = [line.strip() for line in (self.stderr + "\n" + self.stdout).splitlines() if line.strip()]
        ending = self.failure or (f"signal {-self.code}" if self.code is not None and self.code < 0 else "")
        return ": ".join(part for part in (ending, lines[-1] if lines else "") if part) or f"exit code {self.code}"


CommandRunner = Callable[[Sequence[str], Mapping[str, str], str, float], CommandResult]
"""Type of functions that run a command with an environment, a standard input and a time limit in seconds.

The functions never raise an exception.
"""


def run_command(command: Sequence[str], environment: Mapping[str, str], stdin: str, timeout_s: float) -> CommandResult:
    """Runs a command on the real machine, with a time limit."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            input=stdin.encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            start_new_session=True,
        )
    except FileNotFoundError:
        return CommandResult(None, failure="not found")
    except subprocess.TimeoutExpired:
        return CommandResult(None, failure=f"no response within {timeout_s:g} s")
    except OSError as error:
        return CommandResult(None, failure=str(error))
    return CommandResult(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def read_url(url: str) -> str | None:
    """Returns the text at a URL. If the server refuses, returns a line with the reason. Returns None without a server.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=URL_TIMEOUT_S) as reply:
            text: str = reply.read(_MAX_TEXT_BYTES).decode(errors="replace")
            return text
    except urllib.error.HTTPError as error:
        return f"refused: {error.code} {error.reason}\n"
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that the checks examine. The defaults are the real machine; tests simulate another one."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    runner: CommandRunner = run_command
    read_url: Callable[[str], str | None] = read_url
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    usable_cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
    open_files_limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def path(self, absolute: str | Path) -> Path:
        """Returns the path of a file below ``root``. On the real machine, ``root`` is ``/``; tests use another folder.
        """
        return self.root / str(absolute).lstrip("/")

    def read(self, absolute: str | Path) -> str | None:
        """Returns the text of a small file, or None if it cannot be read."""
        try:
            with self.path(absolute).open(encoding="utf-8", errors="replace") as file:
                return file.read(_MAX_TEXT_BYTES)
        except OSError:
            return None

    def names(self, folder: str | Path, pattern: str) -> list[str]:
        """Returns the sorted names in a folder that match a glob pattern. Returns [] if the folder cannot be read."""
        try:
            return sorted(path.name for path in self.path(folder).glob(pattern))
        except OSError:
            return []

    def is_folder(self, absolute: str | Path) -> bool:
        try:
            return self.path(absolute).is_dir()
        except OSError:
            return False

    def run(
        self,
        command: Sequence[str],
        extra_environment: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> CommandResult:
        """Runs a command. Never raises: a failure is a part of the result."""
        return self.runner(command, {**self.environment, **(extra_environment or {})}, stdin, timeout_s)
