"""Finds agents that do not work on their step: their process is stopped, or all of its threads sleep.

An agent also works while one of its child processes does. MindSpore analyses a profile in child processes, and all
threads of the agent sleep meanwhile.

This module reads the states of threads from the kernel. A time limit would not work: on a busy machine, a step takes
many times its usual time. But then its thread is ready to run (state R) or waits for the disk (state D). So a slow
agent is never mistaken for a hanging one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

LOOK_EVERY_S = 0.25
"""Seconds between two checks of the agents' processes. The first check comes after this time without a result."""
STOPPED_S = 1.5
"""Seconds for which one agent must be stopped (SIGSTOP) before the agents count as lost."""
ASLEEP_S = 2.0
ASLEEP_STEPS = 5.0
"""Agents count as lost if all of them sleep for ``ASLEEP_S`` and ``ASLEEP_STEPS`` times the longest step so far."""

ASLEEP_LOOKS = 4
"""Agents do not reply to a probe if all threads of them and of their children sleep in this number of looks."""
_WORKING = frozenset("RD")
"""States of a thread that runs, or waits for a processor or the disk."""


class Vitals:
    """Watches the processes of a group of agents while they have a step. ``pids`` are in order of rank.

    ``may_sleep`` is True if a device computes the step. All threads of an agent may then sleep until the device is
    done.
    """

    def __init__(self, pids: Sequence[int], first_rank: int, *, may_sleep: bool) -> None:
        self._pids = pids
        self._first_rank = first_rank
        self._may_sleep = may_sleep
        self._looked_at = 0.0
        self._stopped_since: float | None = None
        self._asleep_since: float | None = None

    def next_look(self, last_result: float) -> float:
        """Return the time of the next call of ``look``.

        ``last_result`` is the time of the last result, by the same clock.
        """
        return max(self._looked_at, last_result) + LOOK_EVERY_S

    def look(self, now: float, last_result: float, longest_step_s: float) -> str | None:
        """Return the reason why the agents will never complete their step, or None if they may still complete it."""
        if last_result >= self._looked_at:
            self._stopped_since = self._asleep_since = None
        self._looked_at = now
        states = [_thread_states(pid) for pid in self._pids]
        stopped = [self._first_rank + member for member, found in enumerate(states) if found == {"T"}]
        self._stopped_since = _since(self._stopped_since, bool(stopped), now)
        if self._stopped_since is not None and now - self._stopped_since >= STOPPED_S:
            return f"agent {', '.join(map(str, stopped))} was stopped (SIGSTOP) in the middle of a step"
        is_asleep = not self._may_sleep and all(states) and not _any_works(self._pids, states)
        self._asleep_since = _since(self._asleep_since, is_asleep, now)
        longest = ASLEEP_S + ASLEEP_STEPS * longest_step_s
        if self._asleep_since is not None and now - self._asleep_since >= longest:
            return f"agents from {self._first_rank} have done nothing for {longest:.1f} s in the middle of a step"
        return None


class SilentAgents:
    """Watches the processes of agents that have not replied to a probe. ``pids`` are their process ids."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._num_asleep = 0

    def may_reply(self) -> bool:
        """Return False if the agents will not reply: a process is stopped or has ended, or all of them sleep.

        Only ``ASLEEP_LOOKS`` calls in a row decide that the agents sleep, because a reply may wait for this process. A
        slow machine also makes the calls rarer. Returns False if there are no ``pids``.
        """
        states = [_thread_states(pid) for pid in self._pids]
        if not states or any(not found or found <= {"T", "Z"} for found in states):
            return False
        self._num_asleep = 0 if _any_works(self._pids, states) else self._num_asleep + 1
        return self._num_asleep < ASLEEP_LOOKS


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return None if not holds else now if since is None else since


def _thread_states(pid: int) -> set[str]:
    """Return the states of a process's threads, as in ``man proc_pid_stat``. Empty if unknown."""
    states = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                states.add(file.read().rpartition(b")")[2].split()[0].decode())
    except OSError:  # the process or one of its threads has just ended, or this process can open no more files
        return set()
    return states


def _any_works(pids: Sequence[int], states: Sequence[set[str]]) -> bool:
    """Return whether a thread of the processes ``pids`` or of their descendants works.

    ``states`` are those of the threads of each of ``pids``.
    """
    if any(found & _WORKING for found in states):
        return True
    return any(_thread_states(pid) & _WORKING for pid in _descendants(pids))


def _descendants(pids: Sequence[int]) -> list[int]:
    """Return the ids of all children of the processes ``pids``, and of the children's children."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # OSError: it has just ended
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, parents = [], list(pids)
    while parents:
        of_one = children.pop(parents.pop(), [])  # pop: reused process ids may look like a cycle
        found += of_one
        parents += of_one
    return found
