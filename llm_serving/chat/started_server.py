"""The server that a chat starts, and stops when the chat ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from llm_serving.chat.client import ChatError

_READY = "ready "
_STOP_TIMEOUT_S = 30.0
"""Seconds that the chat waits for the end of the server that it has started."""


@contextlib.contextmanager
def started_server(options: Sequence[str]) -> Iterator[str]:
    """Starts ``llm-serving serve`` on a free port and yields its URL. Raises ChatError if the start fails.

    The server has its own session, so that Ctrl-C in the terminal stops an answer and not the server.
    """
    command = [sys.executable, "-m", "llm_serving", "serve", *options, "--port", "0"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(_READY):
                raise ChatError("the server did not start; its message is above")
            yield line.removeprefix(_READY).strip()
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
