"""Finds agents that will never complete their step: their process is stopped, all of their threads sleep, or a thread
computes without end.

An agent also counts as working while one of its child processes works. MindSpore analyses a profile in child processes,
and all threads of the agent sleep meanwhile.

This module reads the states and the processor times of threads from the kernel. A timeout by the clock would not work,
because a step can take many times its usual time on a busy machine. The step's thread is then ready to run
(state R) or waits for the disk (state D), and gets little processor time. So a slow agent is never mistaken for a
hanging one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from llm_serving.executor.pauses import PauseWatch

LOOK_EVERY_S = 0.25
"""Seconds between two checks of the agents' processes. The first check comes after this time without a result."""
STOPPED_S = 1.5
"""Seconds for which one agent must be stopped (SIGSTOP) before the agents count as lost."""
GRACE_S = 2.0
"""Seconds by which a step may always exceed its predicted time before its agents count as lost."""
GRACE_STEPS = 5.0
"""The limit for a step is ``GRACE_S`` seconds plus ``GRACE_STEPS`` times its predicted time. Agents count as lost if
all of them sleep for longer than the limit, or if one thread uses more processor time than the limit. If there is no
prediction, the limit uses the longest step so far, and processor time is not limited.
"""

ASLEEP_LOOKS = 4
"""If all threads of the agents and of their children sleep in this number of consecutive checks, ``SilentAgents``
expects no reply any more.
"""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""Length of a clock tick in seconds. Linux counts processor time in these ticks."""
_WORKING = frozenset("RD")
"""States of a thread that runs, or waits for a processor or the disk."""


class Vitals:
    """Watches the processes of a group of agents while they have a step. ``pids`` are in order of rank.

    ``may_sleep`` is True if a device computes the step. All threads of an agent may then sleep until the device is
    done. Agents that sleep are not counted as lost before ``min_sleep_s`` seconds have passed. ``waits_for_others`` is
    True if the group has agents on other machines. Agents that sleep are then quiet, and never lost, because they may
    wait for agents there.
    """

    def __init__(
        self,
        pids: Sequence[int],
        first_rank: int,
        *,
        may_sleep: bool,
        min_sleep_s: float = 0.0,
        waits_for_others: bool = False,
    ) -> None:
        self._pids = pids
        self._min_sleep_s = min_sleep_s
        self._first_rank = first_rank
        self._may_sleep = may_sleep
        self._waits_for_others = waits_for_others
        self._is_quiet = False
        self._looked_at = 0.0
        self._pauses = PauseWatch()
        self._stopped_since: float | None = None
        self._asleep_since: float | None = None
        self._seconds_before: dict[int, float] = {}
        """Processor time that each thread had used when it was first seen during the step, by the thread's id."""

    def next_look(self, last_result: float) -> float:
        """Returns the time of the next call of ``look``.

        ``last_result`` is the time of the last result, by the same clock.
        """
        return max(self._looked_at, last_result) + LOOK_EVERY_S

    def is_quiet(self, last_sign: float) -> bool:
        """Returns True if the agents have slept for longer than their step may take. They hang, or wait for agents on
        other machines.

        ``last_sign`` is the time of the last result, or of the last data from other machines.
        """
        return self._is_quiet and last_sign < self._looked_at

    def look(
        self, now: float, last_result: float, forecast_s: float | None, longest_s: float, last_data: float = 0.0
    ) -> str | None:
        """Returns the reason why the agents will never complete their step, or None if they may still complete it.

        ``forecast_s`` is the predicted time of the step. None means that it is unknown, for example because the agents
        compile a graph. Then a thread may compute for any time. ``longest_s`` is the time of the longest step so far.
        ``last_data`` is the time of the last data that agents may await in their sleep. While these data arrive, this
        function ignores agents that sleep, but not agents that are stopped or compute.
        """
        if last_result >= self._looked_at:
            self._stopped_since = None
            self._seconds_before = {}
            self._pauses.rest()
        if max(last_result, last_data) >= self._looked_at:
            self._asleep_since = None
        self._looked_at = now
        self._discount(self._pauses.look(now))
        threads = [_threads(pid) for pid in self._pids]
        states = [{state for state, _ in each.values()} for each in threads]
        stopped = [self._first_rank + member for member, found in enumerate(states) if found == {"T"}]
        self._stopped_since = _since(self._stopped_since, bool(stopped), now)
        if self._stopped_since is not None and now - self._stopped_since >= STOPPED_S:
            return f"agent {', '.join(map(str, stopped))} was stopped (SIGSTOP) in the middle of a step"
        if self._may_sleep:
            return None
        patience_s = GRACE_S + GRACE_STEPS * (longest_s if forecast_s is None else forecast_s)
        sleep_s = max(patience_s, self._min_sleep_s)
        is_asleep = all(states) and not _any_works(self._pids, states)
        self._asleep_since = _since(self._asleep_since, is_asleep, now)
        self._is_quiet = self._asleep_since is not None and now - self._asleep_since >= sleep_s
        if self._is_quiet and not self._waits_for_others:
            return f"agents from {self._first_rank} have done nothing for {sleep_s:.1f} s in the middle of a step"
        if forecast_s is None:
            self._seconds_before = {}
            return None
        if now - last_result >= patience_s:  # child processes are read only now, because reading takes milliseconds
            threads += [_threads(pid) for pid in _descendants(self._pids)]
        used_s = self._longest_computation(threads)
        if used_s < patience_s:
            return None
        return (
            f"a thread of the agents from {self._first_rank} has computed for {used_s:.1f} s in the middle of a step, "
            f"which should take {forecast_s:.3f} s"
        )

    def _discount(self, pause_s: float) -> None:
        """Subtracts a pause of this process from the time for which the agents have slept or were stopped.

        Agents also sleep because they wait for this process, for example for the masks of a step.
        """
        if self._stopped_since is not None:
            self._stopped_since += pause_s
        if self._asleep_since is not None:
            self._asleep_since += pause_s

    def _longest_computation(self, threads: Sequence[Mapping[int, tuple[str, float]]]) -> float:
        """Returns the maximum processor time, in seconds, that one thread has used since it was first seen in the step.
        """
        longest = 0.0
        for each in threads:
            for thread, (_, seconds) in each.items():
                longest = max(longest, seconds - self._seconds_before.setdefault(thread, seconds))
        return longest


class SilentAgents:
    """Watches the processes of agents that have not replied to a probe. ``pids`` are their process ids."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._num_asleep = 0

    def may_reply(self) -> bool:
        """Returns False if the agents will not reply: a process is stopped or has ended, or all of them sleep.

        The agents count as asleep only after ``ASLEEP_LOOKS`` consecutive calls that find them asleep. A single call is
        not enough, because an agent also sleeps after its reply, which this process may not have read yet. Returns
        False if there are no ``pids``.
        """
        states = [_thread_states(pid) for pid in self._pids]
        if not states or any(not found or found <= {"T", "Z"} for found in states):
            return False
        self._num_asleep = 0 if _any_works(self._pids, states) else self._num_asleep + 1
        return self._num_asleep < ASLEEP_LOOKS


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return None if not holds else now if since is None else since


def _threads(pid: int) -> dict[int, tuple[str, float]]:
    """Returns the state of each thread of a process, as in ``man proc_pid_stat``, and its processor time in seconds.

    The keys are the ids of the threads. The result is empty if the process is unknown.
    """
    threads = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                threads[int(thread)] = fields[0].decode(), (int(fields[11]) + int(fields[12])) * _TICK_S
    except OSError:  # the process or one of its threads has just ended, or this process can open no more files
        return {}
    return threads


def _thread_states(pid: int) -> set[str]:
    """Returns the states of a process's threads. Empty if unknown."""
    return {state for state, _ in _threads(pid).values()}


def _any_works(pids: Sequence[int], states: Sequence[set[str]]) -> bool:
    """Returns whether a thread of the processes ``pids`` or of their descendants works.

    ``states`` has the states of the threads of each process in ``pids``.
    """
    if any(found & _WORKING for found in states):
        return True
    return any(_thread_states(pid) & _WORKING for pid in _descendants(pids))


def _descendants(pids: Sequence[int]) -> list[int]:
    """Returns the ids of all children of the processes ``pids``, and of the children's children."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # OSError: it has just ended
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, parents = [], list(pids)
    while parents:
        of_one = children.pop(parents.pop(), [])  # ``pop``: ends the loop if reused process ids form a cycle
        found += of_one
        parents += of_one
    return found
