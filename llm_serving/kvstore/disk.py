"""Tiers in folders: they write blocks to files behind the requests, and read them for waiting requests.

All input and output of a tier happens in its mover. The engine thread only looks into the index and adds jobs.
``DiskTier`` is the SSD tier. ``llm_serving.kvstore.shared`` has the tier in a folder that several machines share.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from llm_serving.errors import LLMServingError
from llm_serving.kvstore.mover import Mover
from llm_serving.kvstore.places import Place
from llm_serving.kvstore.segments import SEGMENT_BYTES, FolderLock, SegmentFolder
from llm_serving.scheduler.tier_moves import BlockKey

RETRY_S = 60.0
"""After a failed write, the tier writes nothing for this time."""
_KEEP = 0.9
"""Each read multiplies the weight of earlier reads in the measured bandwidth by this factor."""


class HostPool(Protocol):
    """The host blocks of a replica, in memory that server and agents share."""

    @property
    def block_bytes(self) -> int:
        """Size of a block: the parts of all agents together."""

    def read(self, block: int) -> bytes:
        """Returns the content of a block."""

    def write(self, block: int, content: bytes) -> None:
        """Replaces the content of a block."""


@dataclass(slots=True)
class DiskFigures:
    """Counts of a tier in a folder since the start, except the first two, which are present values."""

    blocks: int = 0
    num_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    rejected: int = 0
    """Number of records that were damaged, cut off or of another block. Each of them counts as a miss."""
    failed_writes: int = 0
    is_full: bool = False
    """True while the tier writes nothing, because a write has failed."""


@dataclass(slots=True)
class Transfer:
    """A read of blocks into host blocks. ``oks`` has one entry for each block once ``done`` is True."""

    keys: list[BlockKey]
    places: list[Place]
    hosts: list[int]
    oks: list[bool]
    done: bool = False


class Records(Protocol):
    """The records of a folder, with an index. Only the mover calls the methods, except ``find``."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    num_rejected: int

    def find(self, chained_hash: bytes) -> Place | None: ...

    def read(self, place: Place, key: BlockKey) -> bytes | None: ...

    def append(self, key: BlockKey, content: bytes) -> None: ...

    def drop_generation(self) -> None: ...

    def close(self) -> None: ...


class FileTier(ABC):
    """A tier in a folder. All replicas of a server share it, because their blocks have the same bits.

    ``on_problem`` takes a text about a problem that an operator should know.
    """

    NAME: ClassVar[str]
    """Name of the tier in metrics and texts."""

    def __init__(self, on_problem: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.figures = DiskFigures()
        self.mover = Mover(self._note_error)
        self._on_open: list[Callable[[], None]] = []
        self._on_problem = on_problem
        self._clock = clock
        self._records: Records | None = None
        """The records that are in use. None while the namespace is not known."""
        self._last: Records | None = None
        """The records that were opened last. They stay open while a new namespace is not known."""
        self._namespace = b""
        self._retry_at = 0.0
        self._read_s = 0.0
        self._read_bytes = 0.0

    @abstractmethod
    def _new_records(self, namespace: bytes) -> Records:
        """Return the records of a namespace. Called in the mover."""

    def open(self, namespace: Callable[[], bytes]) -> None:
        """Opens the records of a namespace, in the mover. Until then, nothing is found and nothing is written.

        ``namespace`` returns the digest. It may take long, because it reads the weights. If it raises an error, the
        tier stays closed.
        """
        self._records = None
        self.mover.submit(lambda: self._open(namespace()), urgent=True)

    def when_open(self, call: Callable[[], None]) -> None:
        """Calls a function whenever the tier has been opened, in the mover."""
        self._on_open.append(call)

    def find(self, key: BlockKey) -> Place | None:
        """Returns the place of a block, or None. The tokens are compared when the block is read."""
        records = self._records
        return None if records is None else records.find(key.chained_hash)

    @property
    def may_write(self) -> bool:
        """True if the tier takes blocks now: it is open, and no write has failed lately."""
        return self._records is not None and self._clock() >= self._retry_at

    def seconds_for(self, places: Sequence[Place]) -> float | None:
        """Returns how long a read takes at the measured bandwidth. None before the first read."""
        num_bytes = sum(place.num_bytes for place in places)
        return num_bytes * self._read_s / self._read_bytes if self._read_bytes else None

    def write(self, key: BlockKey, pool: HostPool, host: int, done: Callable[[], None]) -> None:
        """Writes the content of a host block, which must not change before ``done`` is called, in the mover."""
        records = self._records
        self.mover.submit(lambda: self._write(records, key, pool, host, done))

    def read(self, transfer: Transfer, pool: HostPool, done: Callable[[], None]) -> None:
        """Reads blocks into host blocks, and then calls ``done``, in the mover."""
        self.mover.submit(lambda: self._read(transfer, pool, done), urgent=True)

    def distrust(self) -> None:
        """Removes all blocks that this run has written, because an agent may have computed wrong values."""
        self.mover.submit(self._distrust)

    def close(self) -> None:
        """Ends the mover without the blocks that still wait for the disk.

        ``mover.end`` lets the mover write them before.
        """
        self.mover.close()
        if self._last is not None and not self.mover.is_busy:  # a job may hang, because the disk does not respond
            self._last.close()

    # The following methods run in the mover

    def content(self, place: Place, key: BlockKey) -> bytes | None:
        """Returns the content of a block, or None if it was removed or is damaged."""
        content = None if self._records is None else self._records.read(place, key)
        self._note()
        return content

    def _open(self, namespace: bytes) -> None:
        if self._last is None or self._namespace != namespace:
            if self._last is not None:
                self._last.close()
            self._last = self._new_records(namespace)
            self._namespace = namespace
        self._records = self._last
        self._note()
        for call in self._on_open:
            call()

    def _write(
        self,
        records: Records | None,
        key: BlockKey,
        pool: HostPool,
        host: int,
        done: Callable[[], None],
    ) -> None:
        """Writes a block to ``records``, which were open when the block was computed. Other agents may run now."""
        try:
            if records is None or records is not self._records or not self.may_write:
                return
            content = pool.read(host)
            records.append(key, content)
            self._retry_at = 0.0
            self.figures.written_blocks += 1
            self.figures.written_bytes += len(content)
        except OSError as error:
            self.figures.failed_writes += 1
            self._retry_at = self._clock() + RETRY_S
            self._on_problem(f"the {self.NAME} tier writes nothing for {RETRY_S:g} s: {error}")
        finally:
            self._note()
            done()

    def _read(self, transfer: Transfer, pool: HostPool, done: Callable[[], None]) -> None:
        try:
            for key, place, host in zip(transfer.keys, transfer.places, transfer.hosts, strict=True):
                start = time.perf_counter()
                content = None if self._records is None else self._records.read(place, key)
                ok = content is not None and len(content) == pool.block_bytes
                if content is not None and ok:
                    pool.write(host, content)
                    self._learn(time.perf_counter() - start, len(content))
                transfer.oks.append(ok)
                if not ok:
                    break  # the following blocks are of no use without this one
        finally:
            transfer.oks += [False] * (len(transfer.keys) - len(transfer.oks))
            transfer.done = True
            self._note()
            done()

    def _distrust(self) -> None:
        if self._last is not None:
            self._last.drop_generation()
            self._note()

    def _learn(self, seconds: float, num_bytes: int) -> None:
        self.figures.read_bytes += num_bytes
        self._read_s = self._read_s * _KEEP + seconds
        self._read_bytes = self._read_bytes * _KEEP + num_bytes

    def _note(self) -> None:
        records, figures = self._last, self.figures
        figures.is_full = self._clock() < self._retry_at
        if records is not None:
            figures.blocks, figures.num_bytes, figures.rejected = (
                records.num_blocks,
                records.num_bytes,
                records.num_rejected,
            )

    def _note_error(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, LLMServingError) else repr(error)
        self._on_problem(f"the {self.NAME} tier could not run a job: {reason}")


class DiskTier(FileTier):
    """The SSD tier. Raises ConfigError if the folder cannot be used."""

    NAME = "SSD"

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        on_problem: Callable[[str], None],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(on_problem, clock)
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._lock = FolderLock(folder)

    def close(self) -> None:
        """Ends the mover without the blocks that still wait for the disk, and unlocks the folder."""
        super().close()
        self._lock.close()

    def _new_records(self, namespace: bytes) -> SegmentFolder:
        return SegmentFolder(self._folder, namespace, self._max_bytes, self._segment_bytes)


def pool_of(parts: Sequence[HostPool]) -> HostPool:
    """Returns the host blocks of a replica, whose agents have the given parts of each block."""
    return parts[0] if len(parts) == 1 else _JoinedPool(parts)


class _JoinedPool:
    """The host blocks of several agents. A block is the parts of all agents, in order of rank."""

    def __init__(self, parts: Sequence[HostPool]) -> None:
        self._parts = parts
        self.block_bytes = sum(part.block_bytes for part in parts)

    def read(self, block: int) -> bytes:
        return b"".join(part.read(block) for part in self._parts)

    def write(self, block: int, content: bytes) -> None:
        start = 0
        for part in self._parts:
            part.write(block, content[start : start + part.block_bytes])
            start += part.block_bytes
