"""Finds the free memory and the number of cores of this machine. The memory plan takes them as plain numbers, so tests
can use any machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""A limit of at least this number counts as no limit. Without a limit, cgroup v1 shows a number near 2**63."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: the bytes of host memory that new processes may use, the source of this number, and the number of
    cores.
    """

    available_bytes: int
    available_from: str
    num_cores: int = 1

    @classmethod
    def detect(cls) -> Machine:
        """Returns the cores and the available memory of this machine.

        The available memory is the smaller of two numbers: the free memory of the machine, and the memory that the
        control group (cgroup) still permits.
        """
        import psutil  # imported here, because checking a config does not need psutil

        cores = len(os.sched_getaffinity(0))
        machine = cls(int(psutil.virtual_memory().available), "free memory of the machine", cores)
        group = control_group_available()
        if group is not None and group < machine.available_bytes:
            return cls(max(group, 0), "memory limit of the control group", cores)
        return machine


def process_seconds() -> float:
    """Returns the seconds since this process began."""
    state = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    start_ticks = int(state.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def control_group_available(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the number of bytes that the control groups (cgroup v1 or v2) of this process still permit, or None
    without a limit.

    File cache that the operating system can drop does not count as used.
    """
    left = [group for folder in _own_groups(root, own) if (group := _left_in(folder)) is not None]
    return min(left) if left else None


def _own_groups(root: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of this process's memory control group and of its parents. In a container, these folders may
    be missing.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        group = base / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent == base or base in parent.parents)


def _left_in(folder: Path) -> int | None:
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            return limit - usage + _droppable(folder / "memory.stat")
    return None


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _droppable(file: Path) -> int:
    """Returns the bytes of inactive file cache from the file ``memory.stat``; 0 if it cannot be read."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(numbers.get("total_inactive_file", numbers.get("inactive_file", "0")))
