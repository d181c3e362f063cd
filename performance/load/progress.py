"""Shows the progress of a load test: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from performance.load.batch import Display, LiveCounts
from performance.terminal import progress_bar

LINE_INTERVAL_S = 10.0
"""Seconds between two lines of progress, if the output is no terminal."""


@contextmanager
def progress_display(stream: TextIO = sys.stderr) -> Iterator[Display]:
    """Yields the function that ``run_load`` calls with the current counts."""
    is_terminal = stream.isatty()
    next_line_s = LINE_INTERVAL_S
    last = LiveCounts(0.0, 0, 0, 0, 0, 0)
    with progress_bar(stream) as bar:
        task = bar.add_task("requests", note="")

        def show(counts: LiveCounts) -> None:
            nonlocal last, next_line_s
            if not is_terminal and counts.elapsed_s < next_line_s:
                return
            seconds = counts.elapsed_s - last.elapsed_s
            rate = (counts.pieces - last.pieces) / seconds if seconds > 0 else 0.0
            last, next_line_s = counts, counts.elapsed_s + LINE_INTERVAL_S
            note = f"{counts.in_flight} in flight, {counts.failed} failed, {rate:.0f} tokens/s"
            bar.update(task, total=counts.total, completed=counts.done + counts.failed, note=note)
            if not is_terminal:
                line = f"{counts.elapsed_s:6.0f} s: {counts.done}/{counts.total} done, {note}"
                print(line, file=stream, flush=True)

        yield show
