"""Shows the progress of the server's start: a bar on a terminal, and a line for each completed stage.

A stage can take long without any progress to show, for example the compilation of a graph. ``watch`` therefore shows
the name of the present stage and its seconds again after ``SILENCE_S``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_BAR_CHARS = 28
"""Width of the progress bar."""
_REDRAW_S = 0.05
"""Minimum seconds between two drawings of the progress bar."""
SILENCE_S = 4.0
"""Seconds without output after which the present stage is shown again."""
_BEAT_S = 0.5
"""Seconds between two updates of the elapsed time."""


@dataclass(slots=True)
class _Stage:
    """The stage of the start that an agent is in, for example loading the weights."""

    name: str
    began: float
    done: int = 0
    total: int = 1


class ProgressDisplay:
    """Shows the stages of the agents' start on a stream, until ``close``. Threads may share the object.

    Several agents pass through the same stages. When the last agent has completed a stage, a line with the time of the
    slowest agent is written.
    """

    def __init__(
        self, stream: TextIO = sys.stderr, num_agents: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._num_agents = num_agents
        self._lock = threading.Lock()
        self._console = Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)
        columns = (TextColumn("  {task.description:<34}"), BarColumn(_BAR_CHARS), MofNCompleteColumn())
        self._bar = Progress(
            *columns, console=self._console, transient=True, auto_refresh=False, disable=not stream.isatty()
        )
        self._task = self._bar.add_task("")
        self._drawn_at = 0.0
        self._current: dict[int, _Stage] = {}
        self._completed: dict[str, dict[int, float]] = {}
        """Seconds that each agent needed, by stage and rank. A stage is removed when all agents have completed it."""
        self._closed = threading.Event()
        self._shown_at = clock()
        """The last time at which a line was written or the progress bar was drawn."""
        self._noted_at = self._shown_at

    def watch(self) -> None:
        """Starts a thread that shows the present stage whenever nothing was shown for ``SILENCE_S``, until ``close``.
        """
        threading.Thread(target=self._beat_until_closed, name="progress", daemon=True).start()

    def _beat_until_closed(self) -> None:
        while not self._closed.wait(_BEAT_S):
            self.beat()

    def beat(self) -> None:
        """Shows the present stage and its time if nothing was shown for ``SILENCE_S``."""
        with self._lock:
            now = self._clock()
            if self._closed.is_set() or now - self._shown_at < SILENCE_S:
                return
            if self._bar.live.is_started:
                self._draw(now)
                return
            label, began = "starting the agents", self._noted_at
            if self._current:
                rank, stage = self._oldest()
                label, began = f"agent {rank}: {stage.name}", stage.began
            self._write(f"  {label:<34} {now - began:6.0f} s so far")

    def note(self, text: str) -> None:
        """Writes a last line for the present stage of each agent. Then writes the line ``text``."""
        with self._lock:
            self._end_all()
            self._write(text)
            self._noted_at = self._clock()

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """Shows the progress of agent ``rank``: it has done ``done`` of ``total`` parts of the work of a stage."""
        with self._lock:
            now = self._clock()
            current = self._current.get(rank)
            if current is None or current.name != stage:
                if current is not None:
                    self._complete(rank, current, now)
                current = self._current[rank] = _Stage(stage, now)
            current.done, current.total = done, max(total, 1)
            if not self._closed.is_set() and (now - self._drawn_at >= _REDRAW_S or done >= total):
                self._draw(now)

    def close(self) -> None:
        """Ends the present stages of the agents, each with a line. Later calls show nothing."""
        with self._lock:
            self._end_all()
            self._closed.set()

    def _complete(self, rank: int, stage: _Stage, now: float) -> None:
        completed = self._completed.setdefault(stage.name, {})
        completed[rank] = now - stage.began
        if len(completed) == self._num_agents:
            self._write_stage(stage.name)

    def _end_all(self) -> None:
        now = self._clock()
        self._bar.stop()
        for rank, stage in self._current.items():
            self._complete(rank, stage, now)
        self._current.clear()
        for name in list(self._completed):
            self._write_stage(name)

    def _write_stage(self, name: str) -> None:
        seconds = self._completed.pop(name)
        slowest = max(seconds, key=lambda rank: seconds[rank])
        label = f"agent {slowest}: {name}" if len(seconds) == 1 else f"{len(seconds)} agents: {name}"
        which = f"  (agent {slowest})" if len(seconds) > 1 else ""
        self._write(f"  {label:<34} {seconds[slowest]:6.2f} s{which}")

    def _draw(self, now: float) -> None:
        """Shows the progress bar of one agent: the one whose stage began first."""
        self._drawn_at = now
        rank, stage = self._oldest()
        seconds = now - stage.began
        label = f"agent {rank}: {stage.name}" + (f"  {seconds:.0f} s" if seconds >= SILENCE_S else "")
        if not self._bar.disable:
            self._shown_at = now
        self._bar.update(self._task, description=label, completed=stage.done, total=stage.total)
        if self._bar.live.is_started:
            self._bar.refresh()
        else:
            self._bar.start()

    def _oldest(self) -> tuple[int, _Stage]:
        """Returns the rank and the stage of the agent whose stage began first."""
        return min(self._current.items(), key=lambda each: (each[1].began, each[1].done / each[1].total))

    def _write(self, text: str) -> None:
        """Writes a line above the progress bar."""
        if not self._closed.is_set():
            self._console.print(text)
            self._shown_at = self._clock()
