"""Measures how long the event loop is blocked. While it is blocked, the server sends nothing to any client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from llm_serving.server.http.loop_stacks import LOOK_EVERY_S, LoopStacks
from llm_serving.telemetry.log import EventLog

PERIOD_S = 0.01
"""Seconds between two measurements. The loop may be blocked up to this much longer than a measurement shows."""

QUIET_PERIOD_S = 0.1
"""Seconds between two measurements in the quiet mode, which saves processor time."""

AWAKE_S = 0.1
"""Seconds for which the loop is measured after a client has sent data. Then the timer stops, which saves energy."""

REPORTED_S = 0.05
"""A blocked loop is logged if the process used at least this many seconds of processor time meanwhile."""


class LoopWatch:
    """Measures the longest time for which the event loop was blocked, as the longest delay of a timer on the loop.

    Other programs on a busy machine also delay the timer. Therefore, this class also measures the processor time of
    this process during each delay. This processor time is an upper bound of the time for which the loop itself worked.

    The timer runs only while clients send data or requests are active. If the process has worked for ``REPORTED_S``
    during one delay, the functions that ran on the loop are logged.
    """

    def __init__(self) -> None:
        self._is_quiet = False
        self._longest = 0.0
        self._longest_busy = 0.0
        self._due = 0.0
        self._cpu = self._loop_cpu = 0.0
        self._awake_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy: Callable[[], bool] | None = None
        self._log: EventLog | None = None
        self._stacks: LoopStacks | None = None

    def start(self, is_busy: Callable[[], bool], log: EventLog, *, is_quiet: bool = False) -> None:
        """Starts measuring the running event loop. Call this method in the loop's thread. ``stop`` ends the measuring.

        ``is_busy`` returns True while a request is active. In the quiet mode (``is_quiet``), the loop is measured less
        often.
        """
        self._is_busy, self._log, self._is_quiet = is_busy, log, is_quiet
        self._stacks = LoopStacks(LOOK_EVERY_S + self._period_s if self._is_quiet else LOOK_EVERY_S)
        self.wake()

    def wake(self) -> None:
        """Measures for at least ``AWAKE_S`` seconds. Call this method at each event that may cause work on the event
        loop."""
        self._awake_until = time.monotonic() + AWAKE_S
        if self._timer is None and self._is_busy is not None:
            self._schedule()

    def stop(self) -> None:
        self._is_busy = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stacks is not None:
            self._stacks.stop()
            self._stacks = None

    def take_longest(self) -> tuple[float, float]:
        """Returns two maxima since the last call, in seconds.

        The first is the longest time for which the event loop was blocked. The second is the maximum processor time
        that this process used during one of these times.
        """
        longest = self._longest, self._longest_busy
        self._longest = self._longest_busy = 0.0
        return longest

    @property
    def _period_s(self) -> float:
        return QUIET_PERIOD_S if self._is_quiet else PERIOD_S

    def _schedule(self) -> None:
        self._due = time.monotonic() + self._period_s
        self._cpu, self._loop_cpu = time.process_time(), time.thread_time()
        if self._stacks is not None:
            self._stacks.iterated()
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._measure)

    def _measure(self) -> None:
        delay = time.monotonic() - self._due
        busy = min(delay, time.process_time() - self._cpu)
        self._longest = max(self._longest, delay)
        self._longest_busy = max(self._longest_busy, busy)
        self._timer = None
        if busy >= REPORTED_S:
            self._report(delay, busy)
        if self._is_busy is not None and (time.monotonic() < self._awake_until or self._is_busy()):
            self._schedule()
        elif self._stacks is not None:
            self._stacks.pause()

    def _report(self, delay: float, busy: float) -> None:
        if self._log is not None and self._stacks is not None:
            self._log.event(
                "event_loop_blocked",
                seconds=round(delay, 3),
                cpu_seconds=round(busy, 3),
                loop_cpu_seconds=round(min(delay, time.thread_time() - self._loop_cpu), 3),
                functions=self._stacks.found(),
            )
