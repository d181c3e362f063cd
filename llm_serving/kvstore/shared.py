"""A tier in a folder that several machines share. It has one immutable file for each block, and no locks.

    FOLDER/<namespace>/<first byte of the hash>/<hash>.kv   one record
    FOLDER/<namespace>/<first byte of the hash>/.*.tmp      a file that is being written
    FOLDER/<namespace>/distrusted/<writer>                  a mark, see ``distrust_marks.py``

A file is written under a temporary name and then renamed, so other machines see only complete files. Any machine may
remove any file at any time. If a block of the index has been removed or replaced, its read counts as a miss. No machine
waits for another one. A machine that dies leaves at most a temporary file, which others remove later.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.errors import ConfigError
from llm_serving.ipc.host_pool import HostPool
from llm_serving.kvstore.disk import FileTier, Transfer
from llm_serving.kvstore.distrust_marks import DistrustMarks
from llm_serving.kvstore.mover import Mover
from llm_serving.kvstore.places import Place, Segment
from llm_serving.kvstore.records import HASH_BYTES, RecordBuffer, decode_header, encode_record, view_content

SUFFIX = ".kv"
SCAN_S = 5.0
"""Seconds from one scan of the folder to the next. A lookup after this time starts the next scan, to find files of
other machines.
"""
TRIM_S = 30.0
"""Minimum time between two measurements of the folder's size."""
TEMPORARY_S = 3600.0
"""Age in seconds at which a temporary file is removed. The machine that wrote it must have died."""
LOOK_S = 2.0
"""Seconds between two looks at the marks of other machines. The marks are also read before each read of blocks."""
QUIET_S = 5 * LOOK_S
"""Seconds after a call of ``distrust`` in which a machine neither reads nor writes blocks.

Meanwhile, the machines that have read its blocks also mark their blocks as distrusted, and so on. Without this pause,
two machines could exchange doubtful blocks without end.
"""
_TOUCH_S = 600.0
"""The file of a block that is read gets a new time stamp if its time stamp is older than this number of seconds."""
_KEPT_PART = 0.9
"""Fraction of the folder's maximum size that remains after old files are deleted."""
_numbers = itertools.count()


class SharedFolder:
    """The files of one namespace in a shared folder, with an index. The index may be out of date, because other
    machines write and remove files.

    ``max_bytes`` limits the size of all namespaces together. Above the limit, each machine removes the files that no
    machine has read for the longest time. ``clock`` returns Unix time in seconds, like the times of files.
    """

    def __init__(self, folder: Path, namespace: bytes, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.num_rejected = 0
        self.num_bytes = 0
        """Size of all files in bytes when this machine last measured the folder, plus the files that it has written
        since.
        """
        self._folder = folder
        self._own = folder / namespace.hex()
        self._buffer = RecordBuffer()
        self._namespace = namespace
        self._max_bytes = max_bytes
        self._clock = clock
        self._index: dict[bytes, Place] = {}
        self._written: set[bytes] = set()
        self._changed: dict[str, int] = {}
        """For each scanned folder, its modification time in ns. A folder with the same time is not scanned again."""
        self._trimmed_at = float("-inf")
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._marks = DistrustMarks(self._own)
        with contextlib.suppress(OSError):  # the next looks of ``SharedTier`` report the failure and the recovery
            self.has_doubt()
        self.scan()
        self._trim()

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the index has."""
        return len(self._index)

    def find(self, chained_hash: bytes) -> Place | None:
        """Returns the place of a block that the folder had at the last scan. Returns None while the marks of other
        machines cannot be read, because ``read`` would fail. Any thread may call it.
        """
        return self._index.get(chained_hash) if self._marks.are_known else None

    def scan(self) -> None:
        """Updates the index from the names of the files. Reads only folders that have changed since the last scan.
        Raises OSError.
        """
        for folder in _folders(self._own):
            changed = os.stat(folder).st_mtime_ns
            if self._changed.get(folder) == changed:
                continue
            found = dict(self._places(folder))
            first = bytes.fromhex(os.path.basename(folder))
            for chained_hash in [each for each in self._index if each[:1] == first and each not in found]:
                del self._index[chained_hash]
            self._index.update(found)
            # If another machine adds two files within the resolution of the clock, the second one does not change the
            # folder's time. So a folder that changed in the last 2 seconds is scanned once more.
            if self._clock() - changed / 1e9 > 2.0:
                self._changed[folder] = changed

    def has_doubt(self) -> bool:
        """Reads the marks of other machines. Returns True if this machine has read blocks that another machine now
        distrusts.

        Raises OSError.
        """
        return self._marks.look()

    def read(self, place: Place, key: BlockKey) -> memoryview | None:
        """Returns the content of a block, which is valid until the next call. Returns None if its file was removed, is
        damaged, holds another block, or is of a writer that other machines distrust. Also returns None while the marks
        of other machines cannot be read.
        """
        if not self._marks.are_known:
            return None
        path = place.segment.path
        try:
            with path.open("rb") as file:
                data = self._buffer.read(file.fileno(), place.num_bytes + 1)
        except OSError:
            self._index.pop(key.chained_hash, None)  # another machine has removed it, or the network is down
            return None
        content, header = view_content(data, self._namespace, key), decode_header(data)
        if content is None or header is None or not self._marks.accepts(header.generation):
            self.num_rejected += 1
            self._index.pop(key.chained_hash, None)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        if self._clock() - place.segment.last_use > _TOUCH_S:
            place.segment.last_use = self._clock()
            with contextlib.suppress(OSError):
                os.utime(path)
        return content

    def append(self, key: BlockKey, content: bytes) -> None:
        """Writes the file of a block, unless the index has it.

        Raises OSError if the folder is full or broken. No part of a file is then visible.
        """
        if key.chained_hash in self._index:
            return
        record = encode_record(self._namespace, key, self._marks.own, content)
        if len(record) > self._max_bytes:
            raise OSError(errno.EFBIG, f"a block of {len(record)} bytes exceeds the limit of {self._max_bytes} bytes")
        if self.num_bytes + len(record) > self._max_bytes or self._clock() - self._trimmed_at >= TRIM_S:
            self._trim(len(record))
        name = key.chained_hash.hex()
        folder = self._own / name[:2]
        folder.mkdir(mode=0o700, exist_ok=True)
        path, temporary = folder / f"{name}{SUFFIX}", folder / _temporary_name()
        try:
            with temporary.open("xb") as file:
                file.write(record)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self.num_bytes += len(record)
        self._written.add(key.chained_hash)
        self._index[key.chained_hash] = Place(Segment(path, len(record), self._clock(), is_shared=True), 0, len(record))

    def drop_generation(self) -> None:
        """Marks and removes the files that this run of the server has written, because their contents may be wrong.

        Raises OSError if the mark cannot be made. The files are removed anyway.
        """
        written, self._written = self._written, set()
        try:
            if written:
                self._marks.mark_own()
        finally:
            for chained_hash in written:
                name = chained_hash.hex()
                self._index.pop(chained_hash, None)
                with contextlib.suppress(OSError):
                    (self._own / name[:2] / f"{name}{SUFFIX}").unlink()

    def close(self) -> None:
        """Does nothing, because no file is open."""

    def _places(self, folder: str) -> Iterator[tuple[bytes, Place]]:
        """Yields the blocks that have a file in ``folder``. Removes temporary files of machines that died."""
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError, ValueError):  # the file was removed meanwhile, or its name is foreign
                    if entry.name.endswith(".tmp"):
                        if self._clock() - entry.stat().st_mtime > TEMPORARY_S:
                            os.unlink(entry.path)
                    elif entry.name.endswith(SUFFIX):
                        chained_hash, found = bytes.fromhex(entry.name.removesuffix(SUFFIX)), entry.stat()
                        if len(chained_hash) == HASH_BYTES and found.st_size:
                            segment = Segment(Path(entry.path), found.st_size, found.st_mtime, is_shared=True)
                            yield chained_hash, Place(segment, 0, found.st_size)

    def _trim(self, num_more: int = 0) -> None:
        """Measures the size of all namespaces. If less than ``num_more`` bytes are free, removes the files that have
        not been read for the longest time.
        """
        self._trimmed_at = self._clock()
        files: list[tuple[float, int, str]] = []
        for namespace in _folders(self._folder):
            for folder in _folders(namespace):
                with contextlib.suppress(OSError), os.scandir(folder) as entries:
                    for entry in entries:
                        with contextlib.suppress(OSError):
                            found = entry.stat()
                            files.append((found.st_mtime, found.st_size, entry.path))
        self.num_bytes = sum(size for _, size, _ in files)
        if self.num_bytes + num_more <= self._max_bytes:
            return
        wanted = int(self._max_bytes * _KEPT_PART) - num_more
        for _, size, path in sorted(files):
            if self.num_bytes <= wanted:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            self.num_bytes -= size
            with contextlib.suppress(ValueError):
                self._index.pop(bytes.fromhex(os.path.basename(path).removesuffix(SUFFIX)), None)


class SharedTier(FileTier):
    """The tier in a shared folder. Raises ConfigError if the folder cannot be used."""

    NAME = "shared"

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        on_problem: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(on_problem, clock)
        self.mover = Mover(self._note_error, LOOK_S, self.look)
        self._quiet_until = float("-inf")
        self._lacks_marks = False
        """True after a report that the marks cannot be read, until they can be read again."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._scanned_at = float("-inf")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / _temporary_name()
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            key = f"kv_tier_config.shared_folder = {str(folder)!r}"
            raise ConfigError(f"{key}: the folder cannot be used: {error.strerror}") from None

    def find(self, key: BlockKey) -> Place | None:
        """Returns the place of a block, or None. If the last scan is older than ``SCAN_S`` seconds, asks the mover for
        another one. Returns None for ``QUIET_S`` seconds after a call of ``distrust``, and while the marks cannot be
        read.
        """
        if self._records is not None and self._clock() - self._scanned_at >= SCAN_S:
            self._scanned_at = self._clock()
            self.mover.submit(self._scan)
        return super().find(key) if self._clock() >= self._quiet_until else None

    @property
    def may_write(self) -> bool:
        """True if the tier accepts blocks now, see ``FileTier``. False for ``QUIET_S`` seconds after ``distrust``."""
        return super().may_write and self._clock() >= self._quiet_until

    def distrust(self) -> None:
        """Marks and removes all blocks that this server has written since its start, see ``FileTier``."""
        self._quiet_until = self._clock() + QUIET_S
        super().distrust()

    # The mover's thread calls the following methods.

    def look(self) -> None:
        """Reads the marks of other machines. If this machine has read blocks that are distrusted now, raises
        ``num_doubts`` and wakes the engines. Reports when the marks cannot be read, and when they can be read again.
        """
        if not isinstance(self._last, SharedFolder):
            return
        try:
            has_doubt = self._last.has_doubt()
        except OSError as error:
            if not self._lacks_marks:
                self._lacks_marks = True
                self._on_problem(f"the shared tier reads no blocks while the marks cannot be read: {error}")
            return
        if self._lacks_marks:
            self._lacks_marks = False
            self._on_problem("the shared tier reads blocks again, because the marks can be read again")
        if has_doubt:
            self.num_doubts += 1
            self._on_problem(
                "another machine has distrusted blocks in the shared folder that this server has read; all caches "
                "become empty, and running requests with cached blocks are computed again"
            )
            self._changed()

    def content(self, place: Place, key: BlockKey) -> bytes | None:
        """Returns the content of a block, or None if it was removed, is damaged or distrusted. Also returns None while
        the marks cannot be read.
        """
        self.look()
        return super().content(place, key)

    def _read(self, transfer: Transfer, pool: HostPool, done: Callable[[], None]) -> None:
        self.look()
        super()._read(transfer, pool, done)

    def _scan(self) -> None:
        if isinstance(self._records, SharedFolder):
            self._records.scan()
            self._note()

    def _new_records(self, namespace: bytes) -> SharedFolder:
        return SharedFolder(self._folder, namespace, self._max_bytes)


def _folders(path: str | Path) -> list[str]:
    """Returns the subfolders of ``path`` with hexadecimal names. Other entries do not belong to KV tiers."""
    with os.scandir(path) as entries:
        return sorted(entry.path for entry in entries if _is_hexadecimal(entry.name) and entry.is_dir())


def _is_hexadecimal(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(bytes.fromhex(name)) and name.isalnum()
    return False


def _temporary_name() -> str:
    return f".{socket.gethostname()}-{os.getpid()}-{next(_numbers)}.tmp"
