"""Shows a progress bar while many prompts are computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def call_progress(name: str, total: int, *, show: bool, stream: TextIO | None = None) -> Iterator[Callable[[], None]]:
    """Shows a progress bar for ``total`` calls. Yields a function to call after each of them, in any thread.

    ``name`` is the text before the bar. The default of ``stream`` is the standard error stream. With ``show=False``,
    nothing is written.
    """
    if not show:
        yield _nothing
        return
    console = Console(file=stream or sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        yield partial(bar.advance, bar.add_task(name, total=total))


def _nothing() -> None:
    """Does nothing. Replaces the function that advances the bar if no bar is shown."""
