"""What the user sees while the run goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from performance.load.batch import Display, LiveCounts

LINE_INTERVAL_S = 10.0


class TokenRate:
    """Pieces per second since the last look."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._pieces = 0

    def update(self, counts: LiveCounts) -> float:
        seconds = counts.elapsed_s - self._elapsed_s
        rate = (counts.pieces - self._pieces) / seconds if seconds > 0 else 0.0
        self._elapsed_s, self._pieces = counts.elapsed_s, counts.pieces
        return rate


class ProgressLines:
    """Plain lines, one every ``LINE_INTERVAL_S``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rate = TokenRate()
        self._next_s = LINE_INTERVAL_S

    def __call__(self, counts: LiveCounts) -> None:
        if counts.elapsed_s < self._next_s:
            return
        self._next_s = counts.elapsed_s + LINE_INTERVAL_S
        print(
            f"{counts.elapsed_s:6.0f} s: {counts.done}/{counts.total} done, {counts.in_flight} in flight, "
            f"{counts.failed} failed, {self._rate.update(counts):.0f} tokens/s",
            file=self._stream,
            flush=True,
        )


@contextmanager
def progress_display(stream: TextIO = sys.stderr) -> Iterator[Display]:
    """A display for ``run_load``: a bar when ``stream`` is a terminal and tqdm is there, else lines."""
    bar_class = _tqdm() if stream.isatty() else None
    if bar_class is None:
        yield ProgressLines(stream)
        return
    rate = TokenRate()
    with bar_class(unit="request", file=stream, dynamic_ncols=True, leave=False) as bar:

        def show(counts: LiveCounts) -> None:
            bar.total = counts.total
            bar.n = counts.done + counts.failed
            bar.set_postfix_str(
                f"in flight {counts.in_flight}, failed {counts.failed}, {rate.update(counts):.0f} tokens/s",
                refresh=True,
            )

        yield show


def _tqdm() -> Any:
    """The class of the bar, or None where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
