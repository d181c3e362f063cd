"""The mover: a thread that does all input and output of the SSD tier, so that the engine thread never waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

_LOW_PRIORITY = 10
"""Nice value of the thread, which must not take the processor from the agents. Reads are short."""
_JOIN_S = 1.0


class Mover:
    """Runs jobs in a thread of its own, one after the other. Urgent jobs run before all others.

    ``on_error`` takes the error of a job that failed. The thread then goes on with the next job.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
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
        """Lets the thread end when it has run all jobs that wait. Does not wait for this."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    @property
    def is_busy(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, without the jobs that have not begun. Waits a short time for the job that runs."""
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
            self._changed.wait_for(lambda: self._urgent or self._others or self._ended)
            if self._urgent:
                return self._urgent.popleft()
            return self._others.popleft() if self._others else None
