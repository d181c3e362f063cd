"""Runs a command and prints a line every few seconds, so that a user sees that the command is still running.

    python tools/show_progress.py "installing the packages" pip install -r requirements.lock

A line has the time since the start and the last line that the command wrote. If the command fails, the tool prints all
its output and ends with the same exit code. If the tool is interrupted (Ctrl-C) or terminated, it also ends the
command. The Makefile uses this tool before any package is installed, so the tool needs only the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import NoReturn

SECONDS = 4.0
"""Default of the seconds between two lines of progress."""
WIDTH = 72
"""Number of characters that are shown of the command's last line of output."""
PATIENCE_S = 1.0, 10.0
"""Times that an interrupted command has to end: by itself, because Ctrl-C reaches it too, and then after SIGTERM."""


def run(title: str, command: list[str], seconds: float = SECONDS) -> int:
    """Runs the command, shows its progress every ``seconds`` and returns its exit code.

    An exception, for example a KeyboardInterrupt, ends the command.
    """
    begun, lines, ended = time.monotonic(), [""], threading.Event()

    def show() -> None:
        while not ended.wait(seconds):
            print(f"{title}: {time.monotonic() - begun:.0f} s  {lines[-1][:WIDTH]}", flush=True)

    print(title, flush=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        errors="replace", env=environment,
    ) as process:  # fmt: skip
        shower = threading.Thread(target=show)
        shower.start()
        assert process.stdout is not None
        try:
            lines.extend(stripped for line in process.stdout if (stripped := line.strip()))
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            ended.set()
            shower.join()
    if code != 0:
        print("\n".join(lines), file=sys.stderr)
    print(f"{title}: {'done' if code == 0 else 'failed'} after {time.monotonic() - begun:.0f} s", flush=True)
    return code if code >= 0 else 1


def _end(process: subprocess.Popen[str]) -> None:
    """Waits until the interrupted command has ended, and ends it if it goes on."""
    for seconds, end in zip(PATIENCE_S, (process.terminate, process.kill), strict=True):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            end()
    process.wait()


def _terminated(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> int:
    """Runs the command of the command line. Returns the exit code, as a shell would give it."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return run(sys.argv[1], sys.argv[2:])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
