"""Adds up the memory of a server's processes. Pages that several of these processes share count once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from performance.program import LoadTestError

KIB = 1024
_SHARED_MEMORY = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")
"""Beginnings of the paths of shared memory, which ``Pss_Shmem`` counts."""


@dataclass(frozen=True, slots=True)
class ProcessPages:
    """The memory of one process, in bytes."""

    is_agent: bool
    own: int
    """Bytes of anonymous and shared memory. A page that n processes share counts as 1/n in each of them (PSS)."""
    files: Mapping[str, int]
    """Bytes that are in memory, for each mapped file. A key consists of the file's device and inode number."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory of all processes of a server, in bytes."""

    server: int
    agents: int

    @property
    def total(self) -> int:
        return self.server + self.agents


def add_up(processes: Iterable[ProcessPages]) -> Usage:
    """Adds up the memory of processes. A file counts once, in the process that has most of its pages.

    The proportional set size of files would be too small, because other programs on the machine use the same libraries.
    """
    owners: dict[str, tuple[int, bool]] = {}
    sums = {True: 0, False: 0}
    for process in processes:
        sums[process.is_agent] += process.own
        for file, size in process.files.items():
            owners[file] = max(owners.get(file, (0, False)), (size, process.is_agent))
    for size, is_agent in owners.values():
        sums[is_agent] += size
    return Usage(server=sums[False], agents=sums[True])


def usage_of_children() -> Usage:
    """Returns the memory of this process's children and of their children. Processes that end meanwhile do not count.

    Raises LoadTestError if the system does not permit to read the memory maps.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            found.append(_read(process))
    return add_up(found)


def _read(process: psutil.Process) -> ProcessPages:
    folder, is_agent = Path(f"/proc/{process.pid}"), "agent" in process.cmdline()
    try:
        rollup = (folder / "smaps_rollup").read_text(encoding="ascii")
        maps = (folder / "smaps").read_text(encoding="utf-8", errors="replace")
    except PermissionError as error:
        raise LoadTestError(f"{error.filename} cannot be read; run the program as root") from error
    return ProcessPages(is_agent, own_bytes(rollup), file_bytes(maps))


def own_bytes(rollup: str) -> int:
    """Returns the bytes of anonymous and shared memory in the text of ``/proc/PID/smaps_rollup``."""
    sizes = (line.split() for line in rollup.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return sum(KIB * int(size[1]) for size in sizes)


def file_bytes(maps: str) -> dict[str, int]:
    """Returns the bytes of each mapped file that are in memory, from the text of ``/proc/PID/smaps``.

    Pages that the process has changed are anonymous and do not count.
    """
    found: dict[str, int] = {}
    file: str | None = None
    for line in maps.splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):  # the first line of a mapping: addresses, rights, offset, device, number, path
            _, _, device, number, *path = rest.split(maxsplit=4)
            is_file = number != "0" and not path[0].startswith(_SHARED_MEMORY)
            file = f"{device} {number}" if is_file else None
        elif file is not None and first in ("Rss:", "Anonymous:"):
            sign = 1 if first == "Rss:" else -1
            found[file] = found.get(file, 0) + sign * KIB * int(rest.split()[0])
    return found
