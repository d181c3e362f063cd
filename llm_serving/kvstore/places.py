"""Describes where a tier in a folder has stored a block: the file (segment), the offset and the size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True, eq=False)
class Segment:
    """A file of records. Each record is a block.

    ``hashes`` has the chained hashes of those blocks that a lookup can find. ``last_use`` is a time in seconds.
    """

    path: Path
    num_bytes: int
    last_use: float
    hashes: set[bytes] = field(default_factory=set)
    generation: int = 0
    is_shared: bool = False
    """True if the file is in a folder that several machines share."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record: its segment, its offset in the segment, and its size in bytes."""

    segment: Segment
    offset: int
    num_bytes: int

    @property
    def tier(self) -> str:
        """Name of the tier in metrics."""
        return "shared" if self.segment.is_shared else "ssd"
