"""The log file of a process that the server starts.

A thread copies the process's output into the file, without control characters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import deque
from pathlib import Path

from llm_serving.telemetry.log import printable, report_on_stderr
from llm_serving.telemetry.log_file import LogFile, LossReports, Rotation

PIPE_BYTES = 1024 * 1024
"""Size of the pipe for a process's output. If the pipe is full, the process waits until the server has read from it."""
MAX_LINE_BYTES = 64 * 1024
"""Maximum bytes of a process's output that are read at a time. A longer line is split."""
END_WAIT_S = 1.0
"""Maximum seconds to wait for the end of the output after a process has ended.

Without this limit, a child of the process that still has the pipe open would block ``close``.
"""
TAIL_WAIT_S = 0.25
"""Maximum seconds to wait for the last output of a process that has ended."""
_TAIL_LINES = 60
"""Number of last lines of a process's output that an error message shows."""
_TAIL_CHARS = 4000
"""Maximum length of the last lines that an error message shows."""


class ProcessLog:
    """Appends the output of one process to the file ``path``.

    The caller starts the process with ``descriptor`` as its output, and then calls ``process_started``, even if the
    start failed. If the disk is full, lines are lost, but the process continues. The constructor raises OSError if the
    file cannot be opened.
    """

    def __init__(self, path: Path, rotation: Rotation | None = None) -> None:
        self.path = path
        self._file = LogFile(path, LossReports(_loss_notice, report_on_stderr), rotation)
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._source, self.descriptor = os.pipe()
        with contextlib.suppress(OSError):  # the system may limit pipes to a smaller size
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=self._copy, name=f"log of {path.stem}", daemon=True)
        self._thread.start()

    def process_started(self) -> None:
        """Closes the server's copy of ``descriptor``, so that the pipe reaches its end when the process ends."""
        os.close(self.descriptor)

    def tail(self) -> str:
        """Returns the last lines of the process's output. Waits at most ``TAIL_WAIT_S`` for the end of the output."""
        self._thread.join(TAIL_WAIT_S)
        return "\n".join(self._tail)[-_TAIL_CHARS:].strip()

    def close(self) -> None:
        """Waits until the output has been written. Call it after the end of the process. May be called twice."""
        self._thread.join(END_WAIT_S)

    def _copy(self) -> None:
        """Copies the process's output to the file until the output ends, also a last line without a line break."""
        rest = b""
        while chunk := os.read(self._source, MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) >= MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._write(lines)
        self._write([rest] if rest else [])
        os.close(self._source)
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        texts = [printable(line.removesuffix(b"\r").decode("utf-8", "backslashreplace")) for line in lines]
        self._tail.extend(texts)
        self._file.write(("\n".join(texts) + "\n").encode())


def _loss_notice(number: int) -> bytes:
    return f"({number} pieces of output could not be written here)\n".encode()
