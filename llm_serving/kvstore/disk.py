"""Tiers in folders: they write computed blocks to files in the background, and read the blocks for waiting requests.

All input and output of a tier runs in a thread of its own, the mover (``mover.py``). The engine thread only looks into
the index and adds jobs for the mover. ``DiskTier`` is the SSD tier. ``llm_serving.kvstore.shared`` has the tier in a
folder that several machines share.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.errors import LLMServingError
from llm_serving.ipc.host_pool import HostPool
from llm_serving.kvstore.mover import Mover
from llm_serving.kvstore.places import Place
from llm_serving.kvstore.segments import SEGMENT_BYTES, FolderLock, SegmentFolder

RETRY_S = 60.0
"""Seconds after a failed write in which the tier writes nothing."""
WRITE_BYTES = 2 << 20
"""Maximum bytes of the blocks that a job of the mover writes, unless one block alone is larger. Jobs are short,
because a job that reads blocks for a waiting request may have to wait for another job.
"""
_KEEP = 0.9
"""The measured bandwidth is an average of the reads. Each new read multiplies the weight of earlier reads by this
factor.
"""


@dataclass(slots=True)
class DiskFigures:
    """Figures of a tier in a folder. ``blocks`` and ``num_bytes`` are present values; the other numbers count since the
    start.
    """

    blocks: int = 0
    num_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    rejected: int = 0
    """Number of records that were damaged, cut off, or held another block than expected."""
    failed_writes: int = 0
    is_full: bool = False
    """True while the tier writes nothing because its last write failed."""


@dataclass(slots=True)
class Transfer:
    """A read of blocks from disk into host blocks. When ``done`` is True, ``oks`` states for each block whether its
    read succeeded.
    """

    keys: list[BlockKey]
    places: list[Place]
    hosts: list[int]
    oks: list[bool]
    done: bool = False


@dataclass(frozen=True, slots=True)
class _Write:
    """A host block whose content must be written, and a function that must be called after the write."""

    records: Records | None
    """The records that were open when the write was requested."""
    num_distrusts: int
    """Number of calls of ``FileTier.distrust`` before the write was requested."""
    key: BlockKey
    pool: HostPool
    host: int
    done: Callable[[], None]


class Records(Protocol):
    """The records of blocks in a folder, with an index. Any thread may call ``find``; only the mover calls the other
    methods.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    num_rejected: int

    def find(self, chained_hash: bytes) -> Place | None: ...

    def read(self, place: Place, key: BlockKey) -> memoryview | None:
        """Returns the content of a block, which is valid until the next call, or None."""

    def append(self, key: BlockKey, content: bytes) -> None: ...

    def drop_generation(self) -> None: ...

    def close(self) -> None: ...


class FileTier(ABC):
    """A tier in a folder. All replicas of a server share the tier, because they compute bit-identical blocks.

    ``on_problem`` is called with a text about each problem that an operator should know.
    """

    NAME: ClassVar[str]
    """Name of the tier in metrics and texts."""

    def __init__(self, on_problem: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.figures = DiskFigures()
        self.mover = Mover(self._note_error)
        self.num_doubts = 0
        """Number of times that another machine distrusted blocks which this server had read. After each time, the
        engine must forget all blocks. Any thread may read this number. It is always 0 for the SSD tier.
        """
        self._on_change: list[Callable[[], None]] = []
        self._on_problem = on_problem
        self._clock = clock
        self._records: Records | None = None
        """The records that lookups use. None until the mover has computed the namespace of the agents' blocks."""
        self._last: Records | None = None
        """The records that were opened last. They stay open until the mover knows the namespace of restarted agents."""
        self._namespace = b""
        self._num_distrusts = 0
        """Number of calls of ``distrust``."""
        self._writes: deque[_Write] = deque()
        """The requested writes that have not begun."""
        self._retry_at = 0.0
        self._read_s = 0.0
        self._read_bytes = 0.0

    @abstractmethod
    def _new_records(self, namespace: bytes) -> Records:
        """Opens and returns the records of a namespace. The mover calls this method."""

    def open(self, namespace: Callable[[], bytes]) -> None:
        """Asks the mover to open the tier's records (blocks on disk) of one namespace. Until they are open, the tier
        finds and writes no blocks.

        ``namespace`` is a function that returns the namespace's digest. The mover calls this function, because
        computing the digest may mean reading all weights. If the function raises an error, the tier stays closed.
        """
        self._records = None
        self.mover.submit(lambda: self._open(namespace()), urgent=True)

    def when_changed(self, call: Callable[[], None]) -> None:
        """Registers a function that the mover calls when the tier has been opened, or has raised ``num_doubts``."""
        self._on_change.append(call)

    def find(self, key: BlockKey) -> Place | None:
        """Returns the place of a block, or None. Compares only the hash; ``read`` also compares the tokens."""
        records = self._records
        return None if records is None else records.find(key.chained_hash)

    @property
    def may_write(self) -> bool:
        """True if the tier accepts blocks now: it is open, and no write has failed in the last ``RETRY_S`` seconds."""
        return self._records is not None and self._clock() >= self._retry_at

    def seconds_for(self, places: Sequence[Place]) -> float | None:
        """Returns the expected seconds to read the records at ``places``, from the measured bandwidth. None before the
        first read.
        """
        num_bytes = sum(place.num_bytes for place in places)
        return num_bytes * self._read_s / self._read_bytes if self._read_bytes else None

    def write(self, key: BlockKey, pool: HostPool, host: int, done: Callable[[], None]) -> None:
        """Asks the mover to write the content of a host block, and then to call ``done``. The block must not change
        before ``done`` is called.
        """
        self._writes.append(_Write(self._records, self._num_distrusts, key, pool, host, done))
        self.mover.submit(self._write_next)

    def read(self, transfer: Transfer, pool: HostPool, done: Callable[[], None]) -> None:
        """Asks the mover to read blocks into host blocks, and then to call ``done``."""
        self.mover.submit(lambda: self._read(transfer, pool, done), urgent=True)

    def distrust(self) -> None:
        """Asks the mover to remove all blocks that this server has written since its start, because an agent may have
        computed wrong values. Blocks that wait to be written are not written. A later ``read`` finds none of them.
        """
        self._num_distrusts += 1
        self.mover.submit(self._distrust, urgent=True)

    def close(self) -> None:
        """Ends the mover.

        Blocks that still wait for the disk are lost, unless the caller first calls ``mover.end`` and waits.
        """
        self.mover.close()
        if self._last is not None and not self.mover.is_busy:  # a job may hang, because the disk does not respond
            self._last.close()

    # The mover's thread calls the following methods.

    def content(self, place: Place, key: BlockKey) -> bytes | None:
        """Returns the content of a block, or None if it was removed or is damaged."""
        content = None if self._records is None else self._records.read(place, key)
        self._note()
        return None if content is None else bytes(content)

    def _open(self, namespace: bytes) -> None:
        if self._last is None or self._namespace != namespace:
            if self._last is not None:
                self._last.close()
            self._last = self._new_records(namespace)
            self._namespace = namespace
        self._records = self._last
        self._note()
        self._changed()

    def _changed(self) -> None:
        for call in self._on_change:
            call()

    def _write_next(self) -> None:
        """Writes the next waiting blocks of one pool, as many as one job may write.

        Each ``write`` adds one of these jobs. If earlier jobs have written all waiting blocks, the job does nothing.
        """
        batch = self._next_writes()
        try:
            self._write([each for each in batch if self._is_current(each)])
        finally:
            self._note()
            for each in batch:
                each.done()

    def _next_writes(self) -> list[_Write]:
        if not self._writes:
            return []
        batch = [self._writes.popleft()]
        pool = batch[0].pool
        limit = min(pool.blocks_at_once, WRITE_BYTES // pool.block_bytes)
        while len(batch) < limit and self._writes and self._writes[0].pool is pool:
            batch.append(self._writes.popleft())
        return batch

    def _is_current(self, write: _Write) -> bool:
        """Returns False if a block must not be written. Then the tier accepts no blocks now, or earlier agents with
        another namespace have computed the block, or ``distrust`` was called after the request.
        """
        is_open = write.records is not None and write.records is self._records and self.may_write
        return is_open and write.num_distrusts == self._num_distrusts

    def _write(self, writes: Sequence[_Write]) -> None:
        """Reads the blocks from their pool, and writes them until a write fails. If the machine on which the agents ran
        was lost, some blocks cannot be read from the pool. These are not written.
        """
        contents = writes[0].pool.read([each.host for each in writes]) if writes else []
        for each, content in zip(writes, contents, strict=False):
            assert each.records is not None
            try:
                each.records.append(each.key, content)
            except OSError as error:
                self.figures.failed_writes += 1
                self._retry_at = self._clock() + RETRY_S
                self._on_problem(f"the {self.NAME} tier writes nothing for {RETRY_S:g} s: {error}")
                return
            self._retry_at = 0.0
            self.figures.written_blocks += 1
            self.figures.written_bytes += len(content)

    def _read(self, transfer: Transfer, pool: HostPool, done: Callable[[], None]) -> None:
        try:
            while len(transfer.oks) < len(transfer.keys):
                wanted = slice(len(transfer.oks), len(transfer.oks) + pool.blocks_at_once)
                count = self._read_some(transfer.keys[wanted], transfer.places[wanted], transfer.hosts[wanted], pool)
                transfer.oks += [True] * count
                if count < len(transfer.keys[wanted]):
                    break  # the following blocks are of no use without this one
        finally:
            transfer.oks += [False] * (len(transfer.keys) - len(transfer.oks))
            transfer.done = True
            self._note()
            done()

    def _read_some(
        self, keys: Sequence[BlockKey], places: Sequence[Place], hosts: Sequence[int], pool: HostPool
    ) -> int:
        """Reads blocks into host blocks until a read fails. Returns the number of blocks."""
        start, contents = time.perf_counter(), list[bytes | memoryview]()
        for key, place in zip(keys, places, strict=True):
            content = None if self._records is None else self._records.read(place, key)
            if content is None or len(content) != pool.block_bytes:
                break
            contents.append(content if len(keys) == 1 else bytes(content))
        count = pool.write(hosts[: len(contents)], contents) if contents else 0
        if count == len(contents) > 0:
            self._learn(time.perf_counter() - start, sum(map(len, contents)))
        return count

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
        """Ends the mover and unlocks the folder. Blocks that still wait for the disk are lost."""
        super().close()
        self._lock.close()

    def _new_records(self, namespace: bytes) -> SegmentFolder:
        return SegmentFolder(self._folder, namespace, self._max_bytes, self._segment_bytes)
