"""Compares the stalls of a server's event loop with the delay that the machine itself imposes."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from support.server_process import ServerProcess
from support.time_limits import time_limit

MAX_STALL_S = 0.1
_TICK_S = 0.01
_STALL = re.compile(r"^llm_serving_event_loop_longest_stall_seconds (\S+)", re.M)
_BUSY = re.compile(r"^llm_serving_event_loop_longest_busy_seconds (\S+)", re.M)


@dataclass(frozen=True)
class Stall:
    """The longest stall of the event loop in a period, and measurements that show how much of it the machine caused."""

    loop_s: float
    machine_s: float
    """The longest delay of a thread that only sleeps."""
    busy_s: float
    """Largest processor time that the server used during a stall, in seconds. The event loop itself used at most this
    time.
    """
    waited_s: float
    """Sum over the server's threads of the seconds for which a thread was ready but waited for a processor. Valid for
    short periods only.
    """

    @property
    def own_s(self) -> float:
        """The seconds of the stall that the server caused itself, without the delays that the machine caused."""
        return min(self.busy_s, max(0.0, self.loop_s - self.machine_s))


class StallWatch:
    """Measures the stalls of a server's event loop.

    A thread measures the machine's own delays until the context ends.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._longest = 0.0
        self._waited_ns = self._wait_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> StallWatch:
        self._loop_stall()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def take(self) -> Stall:
        """Returns the longest stall since the last call."""
        loop_s, busy_s = self._loop_stall()
        machine_s, self._longest = self._longest, 0.0
        before, self._waited_ns = self._waited_ns, self._wait_ns()
        return Stall(loop_s, machine_s, busy_s, max(0, self._waited_ns - before) / 1e9)

    def _loop_stall(self) -> tuple[float, float]:
        with urllib.request.urlopen(self._server.url + "/metrics", timeout=time_limit(30)) as response:
            text = response.read().decode()
        stall, busy = _STALL.search(text), _BUSY.search(text)
        assert stall is not None
        assert busy is not None
        return float(stall[1]), float(busy[1])

    def _wait_ns(self) -> int:
        """Returns the kernel's count of nanoseconds for which the server's threads have waited for a processor."""
        waited = 0
        for file in Path(f"/proc/{self._server.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread may end before its file is read
                waited += int(file.read_text().split()[1])
        return waited

    def _run(self) -> None:
        due = time.monotonic() + _TICK_S
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            self._longest = max(self._longest, time.monotonic() - due)
            due = time.monotonic() + _TICK_S
