"""Runs a command and prints a line every few seconds, so that a user sees that the command is still running.

    python tools/show_progress.py "installing the packages" pip install -r requirements.lock

A line has the time since the start and the last line that the command wrote. If the command fails, the tool prints all
its output and ends with the same exit code. The Makefile uses this tool before any package is installed, so the tool
needs only the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

SECONDS = 4.0
"""Seconds between two lines."""
WIDTH = 72
"""Maximum length of the shown output, in characters."""


def run(title: str, command: list[str], seconds: float = SECONDS) -> int:
    """Runs the command, shows its progress every ``seconds`` and returns its exit code."""
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
        lines.extend(stripped for line in process.stdout if (stripped := line.strip()))
        code = process.wait()
        ended.set()
        shower.join()
    if code != 0:
        print("\n".join(lines), file=sys.stderr)
    print(f"{title}: {'done' if code == 0 else 'failed'} after {time.monotonic() - begun:.0f} s", flush=True)
    return code if code >= 0 else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[1], sys.argv[2:]))
