"""``llm-serving chat`` in a pseudo terminal, as a user sees it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from support.small_configs import REPOSITORY
from support.time_limits import time_limit

CTRL_C, CTRL_D = "\x03", "\x04"


class ChatTerminal:
    """A chat that runs in a terminal of its own. ``expect`` reads what it prints, ``type`` presses keys."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=REPOSITORY,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Reads until ``pattern`` matches, and returns the match. The next call begins after the match."""
        deadline = time.monotonic() + time_limit(timeout_s)
        while (found := re.search(pattern, self._unread, re.DOTALL)) is None:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} is not in {self._unread!r}"
            try:
                self._unread += os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
            except OSError as reason:  # the terminal was closed
                raise AssertionError(f"the chat ended; {pattern!r} is not in {self._unread!r}") from reason
        self._unread = self._unread[found.end() :]
        return found

    def wait(self) -> int:
        return self.process.wait(time_limit(60.0))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.wait()
        os.close(self._master)


_RUN = (
    "import fcntl, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # makes Ctrl-C in this terminal send a signal
    "from llm_serving.commands.main import main\n"
    "sys.exit(main(['chat', *sys.argv[1:]]))\n"
)


@contextmanager
def chat_terminal(*arguments: str) -> Iterator[ChatTerminal]:
    """Provides a chat in a terminal. The chat and its servers are always ended, also after an exception."""
    terminal = ChatTerminal(arguments)
    try:
        yield terminal
    finally:
        terminal.close()
