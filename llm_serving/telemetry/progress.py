"""What the launcher shows while agents load and compile: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

_BAR_CHARS = 28
_REDRAW_S = 0.05
_ERASE = "\r\x1b[K"


@dataclass(slots=True)
class _Stage:
    """What an agent is doing."""

    name: str
    began: float
    done: int = 0
    total: int = 1


class ProgressDisplay:
    """Shows stages of the start on a stream. Thread-safe; silent once closed.

    Several agents go through the same stages side by side: a stage has one line, written when the last of them has left
    it, with the time of the slowest. ``clock`` gives seconds.
    """

    def __init__(
        self, stream: TextIO = sys.stderr, num_agents: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._live = stream.isatty()
        self._num_agents = num_agents
        self._lock = threading.Lock()
        self._current: dict[int, _Stage] = {}
        self._left: dict[str, dict[int, float]] = {}
        """Seconds that a stage took each agent that has left it, until all have."""
        self._is_drawn = False
        self._drawn_at = 0.0
        self._closed = False

    def note(self, text: str) -> None:
        """A line of its own; it ends the stages that are under way."""
        with self._lock:
            self._end_all()
            self._write(f"{text}\n")

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of a stage of agent ``rank``."""
        with self._lock:
            now = self._clock()
            current = self._current.get(rank)
            if current is None or current.name != stage:
                if current is not None:
                    self._leave(rank, current, now)
                current = self._current[rank] = _Stage(stage, now)
            current.done, current.total = done, max(total, 1)
            if self._live and (now - self._drawn_at >= _REDRAW_S or done >= total):
                self._draw(now)

    def close(self) -> None:
        """Finish the stages that are under way and show nothing any more."""
        with self._lock:
            self._end_all()
            self._closed = True

    def _leave(self, rank: int, stage: _Stage, now: float) -> None:
        left = self._left.setdefault(stage.name, {})
        left[rank] = now - stage.began
        if len(left) == self._num_agents:
            self._write_stage(stage.name)

    def _end_all(self) -> None:
        now = self._clock()
        for rank, stage in self._current.items():
            self._leave(rank, stage, now)
        self._current.clear()
        for name in list(self._left):
            self._write_stage(name)

    def _write_stage(self, name: str) -> None:
        seconds = self._left.pop(name)
        slowest = max(seconds, key=lambda rank: seconds[rank])
        label = f"agent {slowest}: {name}" if len(seconds) == 1 else f"{len(seconds)} agents: {name}"
        which = f"  (agent {slowest})" if len(seconds) > 1 else ""
        self._write(f"  {label:<34} {seconds[slowest]:6.2f} s{which}\n")

    def _draw(self, now: float) -> None:
        """The bar of the agent that is furthest behind: in the stage that was begun first, with the least done."""
        self._drawn_at = now
        rank, stage = min(self._current.items(), key=lambda each: (each[1].began, each[1].done / each[1].total))
        filled = _BAR_CHARS * stage.done // stage.total
        bar = "█" * filled + "░" * (_BAR_CHARS - filled)
        label = f"agent {rank}: {stage.name}"
        self._write(f"  {label:<34} {bar} {stage.done}/{stage.total}")
        self._is_drawn = True

    def _write(self, text: str) -> None:
        """In place of the bar."""
        if not self._closed:
            self._stream.write(f"{_ERASE}{text}" if self._is_drawn else text)
            self._stream.flush()
        self._is_drawn = False
