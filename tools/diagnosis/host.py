"""The machine as the checks see it: a root of the file system, an environment and a way to run commands.

Everything the checks ask goes through here, so that a test can be any machine.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_TIMEOUT_S = 30.0
_MAX_TEXT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command did. ``code`` is None when it did not run to its end; ``failure`` then says why."""

    code: int | None
    stdout: str = ""
    stderr: str = ""
    failure: str = ""

    @property
    def succeeded(self) -> bool:
        return self.code == 0

    @property
    def last_words(self) -> str:
        """The last line it wrote, or how it ended."""
        lines = [line.strip() for line in (self.stderr + "\n" + self.stdout).splitlines() if line.strip()]
        ending = self.failure or (f"signal {-self.code}" if self.code is not None and self.code < 0 else "")
        return ": ".join(part for part in (ending, lines[-1] if lines else "") if part) or f"exit code {self.code}"


CommandRunner = Callable[[Sequence[str], Mapping[str, str], str, float], CommandResult]
"""Takes the command, the environment, its standard input and the longest time in seconds; never raises."""


def run_command(command: Sequence[str], environment: Mapping[str, str], stdin: str, timeout_s: float) -> CommandResult:
    """The real runner."""
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
        return CommandResult(None, failure=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return CommandResult(None, failure=str(error))
    return CommandResult(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclass(frozen=True, slots=True)
class Host:
    """The machine; its defaults are the real one."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    runner: CommandRunner = run_command
    free_bytes: Callable[[Path], int] = _free_bytes
    usable_cores: Callable[[], int] = _usable_cores
    open_files_limit: Callable[[], int] = _open_files_limit

    def path(self, absolute: str | Path) -> Path:
        """Where the machine's ``absolute`` path lies."""
        return self.root / str(absolute).lstrip("/")

    def read(self, absolute: str | Path) -> str | None:
        """The text of a small file; None when it is not there or may not be read."""
        try:
            with self.path(absolute).open(encoding="utf-8", errors="replace") as file:
                return file.read(_MAX_TEXT_BYTES)
        except OSError:
            return None

    def names(self, folder: str | Path, pattern: str) -> list[str]:
        """Names in a folder that match a glob pattern, sorted; none when it cannot be read."""
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
        """Run a command; whatever befalls it is in the result."""
        return self.runner(command, {**self.environment, **(extra_environment or {})}, stdin, timeout_s)
