"""Adds up the processor time of this process and of its child processes, which are the agents on this machine."""

from __future__ import annotations

import psutil


class ProcessTimes:
    """The processor seconds of this process and its descendants. The sum never decreases, even when an agent ends."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, float], float] = {}
        """Maps each process (its id and start time) to the processor seconds that it had used at the last call."""
        self._total = 0.0

    def seconds(self) -> float:
        """Returns the processor seconds (user and system time) of all these processes on all cores.

        The time that a process used between the last call and its end is missing.
        """
        own = psutil.Process()
        seen = {}
        for process in (own, *own.children(recursive=True)):
            try:
                times = process.cpu_times()
                seen[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        self._total += sum(seconds - self._last.get(key, 0.0) for key, seconds in seen.items())
        self._last = seen
        return self._total
