"""Segments of shared memory, whatever is in them: made and removed by the server, mapped by agents.

A name tells who made the segment and cannot be guessed; the pages are reserved at once, so that a full ``/dev/shm`` is
found at the start and not by a step. The name goes as soon as all have mapped it, the pages with the last mapping.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from llm_serving.errors import ProtocolError

SHM_DIRECTORY = "/dev/shm"
SHM_PREFIX = "llm-serving-"


class NamedSegment:
    """A mapped segment. Who made it removes its name; ``has_name`` only there, and until then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_name = False

    def unlink(self) -> None:
        """Remove the name; the mappings stay. Does nothing the second time, or on an attached segment."""
        if self.has_name:
            self.has_name = False
            os.unlink(os.path.join(SHM_DIRECTORY, self.name))


@contextmanager
def new_segment(num_bytes: int) -> Iterator[tuple[str, mmap.mmap]]:
    """Name and mapping of a new segment of zeros, whose name is removed again when the body fails.

    Raises OSError when /dev/shm is too small.
    """
    name = f"{SHM_PREFIX}{os.getpid()}x{secrets.token_hex(8)}"
    path = os.path.join(SHM_DIRECTORY, name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        yield name, mmap.mmap(descriptor, num_bytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def map_segment(name: str, num_bytes: int, kind: str) -> mmap.mmap:
    """A segment that the server made. Raises ProtocolError, which calls it a ``kind`` segment, when its name or size is
    not as agreed."""
    if not name.startswith(SHM_PREFIX) or not name.removeprefix(SHM_PREFIX).isalnum():
        article = "an" if kind[0] in "aeiou" else "a"
        raise ProtocolError(f"{name!r} is not a name of {article} {kind} segment ({SHM_PREFIX}PIDxHEX)")
    descriptor = os.open(os.path.join(SHM_DIRECTORY, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise ProtocolError(f"the {kind} segment has {size} bytes, the layout needs {num_bytes}")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
