"""What others than this process and its children take of the cores' time."""

from __future__ import annotations

from types import TracebackType

import psutil

__all__ = ["OthersWatch"]


class OthersWatch:
    """A context manager around a run. ``share`` is then the part of all cores' time that others took: other processes,
    the kernel for its own ends, and a hypervisor where the kernel tells. Children that end meanwhile are among them."""

    def __init__(self) -> None:
        self.share = 0.0

    def __enter__(self) -> OthersWatch:
        self._before = _seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        spent, busy, own = (after - before for before, after in zip(self._before, _seconds(), strict=True))
        self.share = max(0.0, busy - own) / spent if spent > 0 else 0.0


def _seconds() -> tuple[float, float, float]:
    """Of all cores since they began: in all, busy, and busy for this process and its children."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    own = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            mine = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += mine.user + mine.system
    return busy + times.idle + times.iowait, busy, own
