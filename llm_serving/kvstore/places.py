"""The place of a block in a tier whose blocks are in a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True, eq=False)
class Segment:
    """A file of records. ``hashes`` are the blocks of the folder's namespace that the index finds in it."""

    path: Path
    num_bytes: int
    last_use: float
    hashes: set[bytes] = field(default_factory=set)
    generation: int = 0
    is_shared: bool = False
    """Whether the file is in a folder that several machines share."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record: its segment, the offset there and its size."""

    segment: Segment
    offset: int
    num_bytes: int

    @property
    def tier(self) -> str:
        """Name of the tier in metrics."""
        return "shared" if self.segment.is_shared else "ssd"
