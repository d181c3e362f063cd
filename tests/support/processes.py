"""Facts about processes that tests have started."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Returns True if a process has ended. A zombie has ended, too, but ``is_running`` counts it as running.

    The memory and the descriptors of a zombie are free. Only its parent has not read its exit code yet.
    """
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def running(pids: Iterable[int]) -> list[int]:
    """Returns the ids of the processes that have not ended."""
    found = []
    for pid in pids:
        try:
            found += [] if has_ended(psutil.Process(pid)) else [pid]
        except psutil.NoSuchProcess:
            continue
    return found


def arguments_of(process: psutil.Process) -> list[str]:
    """Returns the command line of a process. [] if the process has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
