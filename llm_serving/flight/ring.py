"""Writes a flight recording to files (segments) of limited total size. A new segment replaces the oldest one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from llm_serving.flight.format import MAGIC, SUFFIX, encode_frame, segment_name

SEGMENTS_PER_RING = 8
"""Number of segments in a full ring. The deletion of the oldest segment therefore loses an eighth of the recording."""


class SegmentRing:
    """Appends frames to segments in ``folder``, which together have at most ``max_bytes`` bytes.

    Segments of earlier server runs also count, and are deleted first. Each call passes its frames to the operating
    system, so the frames reach the file even if the process is killed. No call waits for the disk. The methods raise
    OSError, for example on a full disk.
    """

    def __init__(self, folder: Path, max_bytes: int, run: str) -> None:
        self.segment_bytes = max_bytes // SEGMENTS_PER_RING
        self.run = run
        self.num_segments = 0
        """Number of segments that this run has started."""
        self.num_bytes = 0
        """Size of the present segment in bytes."""
        self._folder = folder
        self.max_bytes = max_bytes
        self._descriptor = -1

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def begin(self, frames: list[bytes], num_bytes: int) -> None:
        """Closes the present segment, starts the next one and writes ``frames`` to it.

        The new segment will have about ``num_bytes`` bytes. The oldest segments are deleted to make space for it.
        """
        self.close()
        data = b"".join([MAGIC, *frames])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make_room(max(num_bytes, len(data)))
        path = self._folder / segment_name(self.run, self.num_segments)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.num_segments += 1
        self.num_bytes = 0
        self._write(data)

    def append(self, records: list[object]) -> None:
        """Writes one frame of records."""
        self._write(encode_frame(records))

    def close(self) -> None:
        """Closes the present segment. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        while written < len(data):
            written += os.write(self._descriptor, data[written:])
        self.num_bytes += len(data)

    def _make_room(self, wanted: int) -> None:
        """Deletes the oldest segments until ``wanted`` more bytes fit within the size limit."""
        segments = sorted((path.stat().st_mtime_ns, path) for path in self._folder.glob(f"*{SUFFIX}"))
        total = sum(path.stat().st_size for _, path in segments)
        for _, path in segments:
            if total + wanted <= self.max_bytes:
                return
            total -= path.stat().st_size
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
