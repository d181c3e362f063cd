"""Segments of shared memory with any content: the server creates and removes them, agents map them.

A name contains the creator's process id and random digits. The pages are reserved at creation, so that a full
``/dev/shm`` is an error at the start and not in a step. The server removes the name when no further agent must map the
segment. The pages are freed with the last mapping.

The creator holds a lock on the segment's file as long as it maps the file. When the creator ends or is killed, the
operating system drops the lock. So a name without a lock is a leftover of a killed server, and ``remove_leftovers``
removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from llm_serving.errors import ProtocolError

SHM_DIRECTORY = "/dev/shm"
SHM_PREFIX = "llm-serving-"


class NamedSegment:
    """A mapped segment of shared memory.

    ``has_name`` is True if this process created the segment and has not yet removed its name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_name = False

    def unlink(self) -> None:
        """Removes the segment's name; mappings stay valid. Does nothing if this process has no name to remove."""
        if self.has_name:
            self.has_name = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(SHM_DIRECTORY, self.name))


@contextmanager
def new_segment(num_bytes: int) -> Iterator[tuple[str, mmap.mmap]]:
    """Creates a segment of zeros and yields its name and mapping. If the body of ``with`` fails, the name is removed.

    Raises OSError if /dev/shm is too small or not writable.
    """
    name = f"{SHM_PREFIX}{os.getpid()}x{secrets.token_hex(8)}"
    path = os.path.join(SHM_DIRECTORY, name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # The mapping duplicates the descriptor, so the lock stays until the mapping ends.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.posix_fallocate(descriptor, 0, num_bytes)
        yield name, mmap.mmap(descriptor, num_bytes)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def creation_failure(error: OSError, needed: str, remedy: str) -> str:
    """Describes why a segment could not be created. ``needed`` is its size and content, for example ``8 bytes of X``.

    ``remedy`` states what to do if /dev/shm is too small.
    """
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{SHM_DIRECTORY} is not writable: {error.strerror}; make it writable for the user of the server"
    return f"{SHM_DIRECTORY} has no room for {needed}: {error.strerror}; {remedy}"


def remove_leftovers() -> list[str]:
    """Removes the segments that killed servers have left behind, and returns their names.

    A segment is kept if its creator lives (also in another container), or if it belongs to another user.
    """
    removed = []
    for name in os.listdir(SHM_DIRECTORY):
        owner, _, digits = name.removeprefix(SHM_PREFIX).partition("x")
        if not name.startswith(SHM_PREFIX) or not (owner.isdecimal() and digits.isalnum()):
            continue
        if os.path.exists(f"/proc/{owner}"):  # the owner may have created the file and not locked it yet
            continue
        with contextlib.suppress(OSError):
            if _remove_if_unlocked(os.path.join(SHM_DIRECTORY, name)):
                removed.append(name)
    return removed


def _remove_if_unlocked(path: str) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def map_segment(name: str, num_bytes: int, kind: str) -> mmap.mmap:
    """Maps a segment that the server created. ``kind`` describes the segment in error messages.

    Raises ProtocolError if ``name`` cannot be the name of a segment, or if the segment's size is wrong.
    """
    if not name.startswith(SHM_PREFIX) or not name.removeprefix(SHM_PREFIX).isalnum():
        article = "an" if kind[0] in "aeiou" else "a"
        raise ProtocolError(f"{name!r} is not a name of {article} {kind} segment ({SHM_PREFIX}PIDxHEX)")
    descriptor = open_segment(name)
    try:
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise ProtocolError(f"the {kind} segment has {size} bytes, the layout needs {num_bytes}")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def open_segment(name: str) -> int:
    """Opens the file of a segment that still has its name. Returns a descriptor. Raises OSError."""
    return os.open(os.path.join(SHM_DIRECTORY, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


class SegmentLayout(Protocol):
    """The sizes of a segment. Server and agents compute them from the same config."""

    @property
    def num_bytes(self) -> int:
        """Size of the segment in bytes."""


Layout = TypeVar("Layout", bound=SegmentLayout)
Segment = TypeVar("Segment", bound="LaidOutSegment[Any]")


class LaidOutSegment(NamedSegment, Generic[Layout]):
    """A segment with a layout that its users know. The server creates and unlinks it; the agents attach to it."""

    KIND: ClassVar[str]
    """Describes the segment in error messages."""

    def __init__(self, name: str, layout: Layout, mapping: mmap.mmap) -> None:
        super().__init__(name)
        self.layout = layout
        self._make_views(mapping)

    @abstractmethod
    def _make_views(self, mapping: mmap.mmap) -> None:
        """Makes the arrays through which the content is read and written."""

    @classmethod
    def create(cls: type[Segment], layout: Layout) -> Segment:
        """Creates a segment of zeros with reserved pages. Raises OSError if /dev/shm is too small."""
        with new_segment(layout.num_bytes) as (name, mapping):
            memory = cls(name, layout, mapping)
        memory.has_name = True
        return memory

    @classmethod
    def attach(cls: type[Segment], name: str, layout: Layout) -> Segment:
        """Maps a segment that the server created. Raises ProtocolError if its name or size is wrong."""
        return cls(name, layout, map_segment(name, layout.num_bytes, cls.KIND))

    def close(self) -> None:
        """Removes the segment's name. The mapping ends when no view of the segment is left."""
        self.unlink()
