"""Measures the processor time of a server's processes and of the client during a run.

A server is a process with its children. Agents of this project are recognised by their command (``python -m agent``).
For a server of another project, all its children form one group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

AGENT_ARGUMENTS = ["-m", "agent"]


class NoServerProcessError(Exception):
    """Raised if the server's process cannot be found."""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """Seconds of processor time in a run, by group of processes: ``server``, ``agent``, ``children``, ``client``."""

    wall_s: float
    processors: int
    cpu_s: Mapping[str, float]

    @property
    def shares_of_used(self) -> dict[str, float]:
        """Each group's fraction of the processor time that all groups used together."""
        used = sum(self.cpu_s.values())
        return {group: seconds / used if used else 0.0 for group, seconds in self.cpu_s.items()}

    @property
    def shares_of_machine(self) -> dict[str, float]:
        """Each group's fraction of the processor time that the machine had during the run."""
        available = self.wall_s * self.processors
        return {group: seconds / available for group, seconds in self.cpu_s.items()}

    def text(self) -> str:
        used, whole = self.shares_of_used, self.shares_of_machine
        parts = [
            f"{group} {seconds:.1f} s ({used[group]:.1%} of the processor time used, {whole[group]:.1%} of the machine)"
            for group, seconds in self.cpu_s.items()
        ]
        return "CPU: " + ", ".join(parts)

    def as_dict(self) -> dict[str, object]:
        return {
            "wall_s": self.wall_s,
            "processors": self.processors,
            "cpu_s": dict(self.cpu_s),
            "shares_of_used": self.shares_of_used,
            "shares_of_machine": self.shares_of_machine,
        }


class CpuMeter:
    """Measures processor time from ``start`` to ``stop``, without processes that end before ``stop``."""

    def __init__(self, server_pid: int) -> None:
        try:
            self._server = psutil.Process(server_pid)
        except psutil.NoSuchProcess as error:
            raise NoServerProcessError(f"there is no process {server_pid}") from error
        self._began = 0.0
        self._before: dict[str, float] = {}

    def start(self) -> None:
        self._began = time.monotonic()
        self._before = self._read()

    def stop(self) -> CpuShare:
        after = self._read()
        cpu_s = {group: max(0.0, seconds - self._before.get(group, 0.0)) for group, seconds in after.items()}
        return CpuShare(time.monotonic() - self._began, os.cpu_count() or 1, cpu_s)

    def _read(self) -> dict[str, float]:
        groups = {"server": _cpu_seconds(self._server)}
        for child in self._server.children(recursive=True):
            group = "agent" if _is_agent(child) else "children"
            groups[group] = groups.get(group, 0.0) + _cpu_seconds(child)
        return {**groups, "client": time.process_time()}


def find_server_pid(port: int) -> int:
    """Returns the id of the process that listens on ``port``. Raises NoServerProcessError if this user sees none."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            return connection.pid
    raise NoServerProcessError(f"no process of this user listens on port {port}; name it with --server-pid")


def _cpu_seconds(process: psutil.Process) -> float:
    """Returns the processor time of a process, or 0 if it has ended.

    Its CPU clock has nanoseconds, and ``/proc`` has steps of 10 ms. An idle server uses less than that in a second.
    """
    try:
        return time.clock_gettime((~process.pid << 3) | 2)  # the id of the clock, as in clock_getcpuclockid(3)
    except OSError:
        return 0.0


def _is_agent(process: psutil.Process) -> bool:
    try:
        arguments = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(arguments[i : i + 2] == AGENT_ARGUMENTS for i in range(len(arguments)))
