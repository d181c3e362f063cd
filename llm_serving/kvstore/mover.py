"""The mover: a thread that does all input and output of a tier in a folder. So the engine thread never waits for a
disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

_LOW_PRIORITY = 10
"""Nice value of the thread. Its low priority leaves the processor to the agents."""
_JOIN_S = 1.0
"""Maximum seconds to wait for the running job of a mover that ends."""


class Mover:
    """Runs jobs one after the other in a separate thread. Urgent jobs run before all others.

    If a job raises an error, the thread passes the error to ``on_error`` and runs the next job.
    """

    def __init__(
        self, on_error: Callable[[Exception], None], every_s: float = 0.0, repeated: Callable[[], None] | None = None
    ) -> None:
        """``repeated`` is a job that runs every ``every_s`` seconds, before the jobs that are not urgent."""
        self._on_error = on_error
        self._every_s, self._repeated = every_s, repeated
        self._due = time.monotonic() + every_s
        self._urgent: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun and are not urgent."""
        return len(self._others)

    def submit(self, job: Callable[[], None], *, urgent: bool = False) -> None:
        """Adds a job. Any thread may call it. After ``close``, jobs are ignored."""
        with self._changed:
            if not self._ended:
                (self._urgent if urgent else self._others).append(job)
                self._changed.notify()

    def end(self) -> None:
        """Asks the thread to end after all jobs that wait now. Returns immediately."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    @property
    def is_busy(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread and drops the jobs that have not begun. Waits at most ``_JOIN_S`` seconds for the running
        job.
        """
        self.end()
        with self._changed:
            self._urgent.clear()
            self._others.clear()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:
                self._on_error(error)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not (self._urgent or self._others or self._ended or self._is_due):
                self._changed.wait(None if self._repeated is None else max(0.0, self._due - time.monotonic()))
            if self._urgent:
                return self._urgent.popleft()
            if self._is_due and not self._ended:
                self._due = time.monotonic() + self._every_s
                return self._repeated
            return self._others.popleft() if self._others else None

    @property
    def _is_due(self) -> bool:
        return self._repeated is not None and time.monotonic() >= self._due
