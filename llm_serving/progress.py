"""What the launcher shows while agents load and compile: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

_BAR_CHARS = 28
_REDRAW_S = 0.05


class ProgressDisplay:
    """Shows stages of the start on a stream. Thread-safe; silent once closed."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._lock = threading.Lock()
        self._stage = ""
        self._stage_start = 0.0
        self._drawn_at = 0.0
        self._closed = False

    def note(self, text: str) -> None:
        """A line of its own."""
        with self._lock:
            self._end_stage()
            self._write(f"{text}\n")

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of a stage of agent ``rank``."""
        with self._lock:
            label = f"agent {rank}: {stage}"
            now = time.monotonic()
            if label != self._stage:
                self._end_stage()
                self._stage, self._stage_start = label, now
            if self._live and (now - self._drawn_at >= _REDRAW_S or done >= total):
                self._drawn_at = now
                filled = _BAR_CHARS * done // max(total, 1)
                bar = "█" * filled + "░" * (_BAR_CHARS - filled)
                self._write(f"\r\x1b[K  {label:<34} {bar} {done}/{total}")

    def close(self) -> None:
        """Finish the current stage's line and show nothing any more."""
        with self._lock:
            self._end_stage()
            self._closed = True

    def _end_stage(self) -> None:
        if not self._stage:
            return
        seconds = time.monotonic() - self._stage_start
        self._write(f"{chr(13) + chr(27) + '[K' if self._live else ''}  {self._stage:<34} {seconds:6.2f} s\n")
        self._stage = ""

    def _write(self, text: str) -> None:
        if not self._closed:
            self._stream.write(text)
            self._stream.flush()
