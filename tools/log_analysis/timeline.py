"""Collects values over time in bounded memory, as counts, sums and maxima of time buckets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_BUCKETS = 512
"""Maximum number of time buckets. If there are more, two neighbours become one."""


@dataclass(slots=True)
class Cell:
    """Count, sum and maximum of the values of one name in one time bucket."""

    count: int = 0
    sum: float = 0.0
    max: float = float("-inf")

    @property
    def mean(self) -> float:
        return self.sum / self.count

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self.max = max(self.max, value)

    def merge(self, other: Cell) -> None:
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)


@dataclass(frozen=True, slots=True)
class Point:
    """A time bucket. ``seconds`` is its middle, counted from the timeline's origin."""

    seconds: float
    cell: Cell


class Timeline:
    """Named values in time buckets. A bucket is one second wide at first; if there are too many, the width doubles.

    The origin is the time of the first value that is added. A value with an earlier time belongs to the first bucket.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self._buckets: dict[str, dict[int, Cell]] = {}
        self.origin: float | None = None
        self.width = 1.0
        self.duration = 0.0

    def add(self, time: float, name: str, value: float) -> None:
        if self.origin is None:
            self.origin = time
        seconds = max(0.0, time - self.origin)
        self.duration = max(self.duration, seconds)
        while seconds >= self.width * self._max_buckets:
            self._halve()
        cells = self._buckets.setdefault(name, {})
        cells.setdefault(int(seconds / self.width), Cell()).add(value)

    def points(self, name: str) -> list[Point]:
        """Returns the time buckets that have values of ``name``, in order of time."""
        cells = self._buckets.get(name, {})
        return [Point((index + 0.5) * self.width, cells[index]) for index in sorted(cells)]

    def total(self, name: str) -> Cell:
        """Returns count, sum and maximum of all values of ``name``."""
        whole = Cell()
        for cell in self._buckets.get(name, {}).values():
            whole.merge(cell)
        return whole

    def rate(self, name: str) -> list[tuple[float, float]]:
        """Returns (middle in seconds, sum of values per second) of every time bucket, including empty buckets."""
        cells = self._buckets.get(name, {})
        buckets: Iterable[int] = range(int(self.duration / self.width) + 1)
        return [((index + 0.5) * self.width, cells.get(index, Cell()).sum / self.width) for index in buckets]

    def _halve(self) -> None:
        self.width *= 2
        for name, cells in self._buckets.items():
            merged: dict[int, Cell] = {}
            for index, cell in cells.items():
                merged.setdefault(index // 2, Cell()).merge(cell)
            self._buckets[name] = merged
