"""CPU time of the processes behind a server, and of the client, over a run: who used the machine for what.

The server is a process and everything it started. Of this project's server the agents are told apart by their command
(``python -m agent``); of any other server the children are one group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

AGENT_ARGUMENTS = ["-m", "agent"]


class NoServerProcessError(Exception):
    """The server's process is not known."""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """Of one run. Seconds of CPU time by group: ``server``, ``agent`` or ``children``, ``client``."""

    wall_s: float
    processors: int
    cpu_s: Mapping[str, float]

    @property
    def shares_of_used(self) -> dict[str, float]:
        """Of the CPU time that all groups used together."""
        used = sum(self.cpu_s.values())
        return {group: seconds / used if used else 0.0 for group, seconds in self.cpu_s.items()}

    @property
    def shares_of_machine(self) -> dict[str, float]:
        """Of the CPU time that there was."""
        there_was = self.wall_s * self.processors
        return {group: seconds / there_was for group, seconds in self.cpu_s.items()}

    def text(self) -> str:
        used, whole = self.shares_of_used, self.shares_of_machine
        parts = [
            f"{group} {seconds:.1f} s ({used[group]:.1%} of the CPU time used, {whole[group]:.1%} of the machine)"
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
    """``start`` and ``stop`` around a run. Processes that end in between are counted as far as they were seen."""

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
        client = psutil.Process().cpu_times()
        groups = {"server": _cpu_seconds([self._server])}
        for child in self._server.children(recursive=True):
            group = "agent" if _is_agent(child) else "children"
            groups[group] = groups.get(group, 0.0) + _cpu_seconds([child])
        return {**groups, "client": client.user + client.system}


def find_server_pid(port: int) -> int:
    """The process that listens on ``port`` here. Raises NoServerProcessError when there is none, or it is hidden."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            return connection.pid
    raise NoServerProcessError(f"no process of this user listens on port {port}; name it with --server-pid")


def _cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _is_agent(process: psutil.Process) -> bool:
    try:
        arguments = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(arguments[i : i + 2] == AGENT_ARGUMENTS for i in range(len(arguments)))
