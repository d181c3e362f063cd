"""A folder with segments, which are append-only files of records. Their total size is limited.

    FOLDER/lock                     held by the server that uses the folder
    FOLDER/<namespace>/00000001.kv  records, the oldest first

If a server is killed while it writes, the last record of its segment is incomplete. The next scan ignores this record.
When the folder is full, the segment that has not been read for the longest time is deleted. Any thread may call
``find``; only the mover's thread may call the other methods.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import ClassVar

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.errors import ConfigError
from llm_serving.kvstore.places import Place, Segment
from llm_serving.kvstore.records import (
    HEADER_BYTES,
    MAX_TOKEN_BYTES,
    RecordBuffer,
    RecordHeader,
    decode_header,
    encode_record,
    view_content,
)

SEGMENT_BYTES = 64 << 20
"""Size at which a segment of a KV tier is complete and the next one begins."""
SUFFIX = ".kv"
_LOCK = "lock"


class FolderLock:
    """Creates a folder that only this user can read, and locks it against other servers until ``close``.

    Several models of one server may use the same folder. Raises ConfigError if the folder cannot be used, or if another
    server uses it.
    """

    _held: ClassVar[dict[str, tuple[int, int]]] = {}
    """For each locked folder: the descriptor that holds the lock, and the number of users in this process."""
    _changes: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self._key = str(folder.resolve())
        with self._changes:
            descriptor, users = self._held.get(self._key) or (_locked(folder), 0)
            self._held[self._key] = (descriptor, users + 1)

    def close(self) -> None:
        """Unlocks the folder if no other model of this server uses it."""
        with self._changes:
            descriptor, users = self._held.pop(self._key)
            if users > 1:
                self._held[self._key] = (descriptor, users - 1)
            else:
                os.close(descriptor)


def _locked(folder: Path) -> int:
    key = f"kv_tier_config.ssd_folder = {str(folder)!r}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{key}: the folder cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"{key}: another server uses this folder; each server needs a folder of its own") from None
    return descriptor


class SegmentFolder:
    """The records of all namespaces in a folder, with an index of the records of ``namespace``.

    The constructor scans the folder. ``max_bytes`` limits the size of all segments together.
    """

    def __init__(self, folder: Path, namespace: bytes, max_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.num_rejected = 0
        """Number of records that a read or a scan found to be damaged or cut off."""
        self.generation = 1
        self._buffer = RecordBuffer()
        self._namespace = namespace
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max_bytes)
        self._index: dict[bytes, Place] = {}
        self._folder = folder
        self._own = folder / namespace.hex()
        self._open: tuple[Segment, int] | None = None
        self._clock = 0.0
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._segments = [self._described(path) for path in sorted(folder.glob(f"*/*{SUFFIX}"))]
        for segment in self._segments:
            self._clock = max(self._clock, segment.last_use)
            if segment.path.parent == self._own:
                self._scan(segment)
        self._number = max((int(one.path.stem) for one in self._segments if one.path.parent == self._own), default=0)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that can be found."""
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Size of all segments of the folder in bytes, including those of other namespaces."""
        return sum(segment.num_bytes for segment in self._segments)

    def find(self, chained_hash: bytes) -> Place | None:
        """Returns the place of a block's record. Any thread may call it. ``read`` compares the tokens."""
        return self._index.get(chained_hash)

    def read(self, place: Place, key: BlockKey) -> memoryview | None:
        """Returns the content of a block, which is valid until the next call. If the record is damaged or holds another
        block, removes it from the index and returns None.
        """
        content = None
        with contextlib.suppress(OSError), place.segment.path.open("rb") as file:
            data = self._buffer.read(file.fileno(), place.num_bytes, place.offset)
            content = view_content(data, self._namespace, key)
        if content is None:
            self.num_rejected += 1
            self._forget(place.segment, key.chained_hash)
        else:
            self._note_use(place.segment)
        return content

    def append(self, key: BlockKey, content: bytes) -> None:
        """Writes the record of a block, unless the folder has it already.

        Raises OSError if the disk is full or broken. The incomplete record is then removed.
        """
        if key.chained_hash in self._index:
            return
        record = encode_record(self._namespace, key, self.generation, content)
        if len(record) > self._max_bytes:
            raise OSError(errno.EFBIG, f"a block of {len(record)} bytes exceeds the limit of {self._max_bytes} bytes")
        segment, descriptor = self._segment_for(len(record))
        offset = segment.num_bytes
        try:
            _write_all(descriptor, record)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, offset)
            raise
        segment.num_bytes += len(record)
        segment.hashes.add(key.chained_hash)
        self._index[key.chained_hash] = Place(segment, offset, len(record))

    def drop_generation(self) -> None:
        """Removes all segments that this run of the server has written, because their contents may be wrong."""
        for segment in [one for one in self._segments if one.generation == self.generation]:
            self._remove(segment)

    def close(self) -> None:
        """Closes the segment that is being written."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _described(self, path: Path) -> Segment:
        found = path.stat()
        return Segment(path, found.st_size, found.st_mtime)

    def _scan(self, segment: Segment) -> None:
        """Adds the records of a segment to the index. Stops at the first record that is not complete."""
        offset = 0
        with segment.path.open("rb") as file:
            while offset < segment.num_bytes:
                header = decode_header(os.pread(file.fileno(), HEADER_BYTES + MAX_TOKEN_BYTES, offset))
                if header is None or offset + header.num_bytes > segment.num_bytes:
                    break
                self._enter(segment, offset, header)
                offset += header.num_bytes
        if offset < segment.num_bytes:
            self.num_rejected += 1

    def _enter(self, segment: Segment, offset: int, header: RecordHeader) -> None:
        self.generation = max(self.generation, header.generation + 1)
        chained_hash = header.key.chained_hash
        if header.namespace != self._namespace:
            return
        before = self._index.get(chained_hash)
        if before is not None:
            before.segment.hashes.discard(chained_hash)
        segment.hashes.add(chained_hash)
        self._index[chained_hash] = Place(segment, offset, header.num_bytes)

    def _segment_for(self, num_bytes: int) -> tuple[Segment, int]:
        """Returns a segment with space for ``num_bytes`` bytes, and its descriptor. Removes old segments if the folder
        is full.
        """
        if self._open is not None and self._open[0].num_bytes + num_bytes > self._segment_bytes:
            self.close()
        if self._open is None:
            self._find_others()
        while self._segments and self.num_bytes + num_bytes > self._max_bytes:
            oldest = min(self._segments, key=lambda segment: segment.last_use)
            self._remove(oldest)
        if self._open is None:
            path, descriptor = self._new_file()
            self._clock += 1.0
            segment = Segment(path, 0, self._clock, generation=self.generation)
            self._segments.append(segment)
            self._open = (segment, descriptor)
        return self._open

    def _find_others(self) -> None:
        """Updates the list of segments: other models of this server may have added, extended or removed some."""
        known = {segment.path: segment for segment in self._segments}
        found = set(self._folder.glob(f"*/*{SUFFIX}"))
        for path in known.keys() - found:
            self._remove(known[path])
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                if path not in known:
                    self._segments.append(self._described(path))
                elif path.parent != self._own:
                    known[path].num_bytes = path.stat().st_size

    def _new_file(self) -> tuple[Path, int]:
        """Creates the file of a new segment. Returns its path and descriptor."""
        while True:
            self._number += 1
            path = self._own / f"{self._number:08d}{SUFFIX}"
            with contextlib.suppress(FileExistsError):  # another version of the same model has made this file
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                return path, os.open(path, flags, 0o600)

    def _note_use(self, segment: Segment) -> None:
        """Marks a segment as the most recently used one, so that it is removed last. Also sets the time of its file, so
        that the server knows the order after a restart.
        """
        self._clock += 1.0
        segment.last_use = self._clock
        with contextlib.suppress(OSError):
            os.utime(segment.path)

    def _remove(self, segment: Segment) -> None:
        if self._open is not None and self._open[0] is segment:
            self.close()
        for chained_hash in list(segment.hashes):
            self._forget(segment, chained_hash)
        self._segments.remove(segment)
        with contextlib.suppress(FileNotFoundError):
            segment.path.unlink()

    def _forget(self, segment: Segment, chained_hash: bytes) -> None:
        segment.hashes.discard(chained_hash)
        place = self._index.get(chained_hash)
        if place is not None and place.segment is segment:
            del self._index[chained_hash]


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
