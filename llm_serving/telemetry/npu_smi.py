"""Reads the table of ``npu-smi info``: health, temperature, use and memory of each NPU chip, and its processes."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_MIB = 1024 * 1024
TIMEOUT_S = 30.0
"""Maximum seconds to wait for ``npu-smi``."""

_FIRST_LINE = re.compile(r"\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|\s*(\S+)?\s*(\S+)?")
_SECOND_LINE = re.compile(r"\|\s*(\d+)\s+(?:\d+\s*)?\|\s*([0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+)\s*\|(.*)\|")
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_AI_CORE = re.compile(r"\s*(\d+)\s+\d+\s*/")
_PROCESS = re.compile(r"\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(.*?)\s*\|\s*(\d+)\s*\|")


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip in the table of ``npu-smi info``.

    ``number`` is the position of the chip in the table, from 0, and also its device id in ACL.
    """

    number: int
    npu: int
    chip: int
    name: str
    health: str
    used_mib: int
    total_mib: int
    temperature_c: float | None = None
    """Temperature of the chip in degrees Celsius. None if the table has no number."""
    power_w: float | None = None
    ai_core_percent: int | None = None
    """Utilisation of the matrix and vector cores in the last sampling interval, in percent."""
    bus_id: str = ""
    """PCI address of the chip, such as ``0000:C1:00.0``."""

    @property
    def free_bytes(self) -> int:
        return (self.total_mib - self.used_mib) * _MIB

    @property
    def is_healthy(self) -> bool:
        """Whether the driver reports no fault."""
        return self.health.upper() == "OK"


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that uses memory of a chip, as ``npu-smi info`` lists it."""

    npu: int
    chip: int
    pid: int
    name: str
    used_mib: int


def parse_npu_smi(text: str) -> tuple[tuple[Chip, ...], tuple[DeviceProcess, ...]]:
    """Returns chips and processes from the output of ``npu-smi info``. Other lines are skipped."""
    chips: list[Chip] = []
    processes: list[DeviceProcess] = []
    first: re.Match[str] | None = None
    for line in text.splitlines():
        if (process := _PROCESS.fullmatch(line.strip())) is not None:
            npu, chip, pid, name, used = process.groups()
            processes.append(DeviceProcess(int(npu), int(chip), int(pid), name, int(used)))
        elif (second := _SECOND_LINE.fullmatch(line.strip())) is not None and first is not None:
            chips.append(_chip(len(chips), first, second))
            first = None
        elif (match := _FIRST_LINE.match(line.strip())) is not None:
            first = match
    return tuple(chips), tuple(processes)


def read_chips() -> tuple[Chip, ...]:
    """Runs ``npu-smi info`` and returns its chips. Empty if the program is missing or fails.

    The program may take seconds.
    """
    try:
        done = subprocess.run(
            ["npu-smi", "info"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ()
    return parse_npu_smi(done.stdout)[0] if done.returncode == 0 else ()


def _chip(number: int, first: re.Match[str], second: re.Match[str]) -> Chip:
    usage = [(int(used), int(total)) for used, total in _USAGE.findall(second[3])]
    used, total = max(usage, key=lambda each: each[1], default=(0, 0))
    busy = _AI_CORE.match(second[3])
    return Chip(
        number=number,
        npu=int(first[1]),
        chip=int(second[1]),
        name=first[2],
        health=first[3],
        used_mib=used,
        total_mib=total,
        temperature_c=_number(first[5]),
        power_w=_number(first[4]),
        ai_core_percent=None if busy is None else int(busy[1]),
        bus_id=second[2],
    )


def _number(text: str | None) -> float | None:
    """Returns a number of the table, or None for a dash or an empty cell."""
    try:
        return float(text or "")
    except ValueError:
        return None
