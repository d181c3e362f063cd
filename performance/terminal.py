"""Formats tables and shows progress bars for the command-line programs."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from llm_serving.telemetry.statistics import Summary

SUMMARY_COLUMNS = ("mean", "p50", "p90", "p99", "max")
"""Fields of ``Summary`` that every table of latencies shows. To add a column, add its name here."""
MAX_WIDTH = 1000
"""Width of the console for tables, in characters. Large enough that no line is wrapped, because programs also read
tables.
"""


def format_number(value: float | None) -> str:
    """Returns three or four significant digits without an exponent, an integer unchanged, or ``-`` for None."""
    if value is None:
        return "-"
    if value == 0 or isinstance(value, int):
        return str(int(value))
    magnitude = abs(value)
    digits = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{digits}f}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an indented table. The first column is left-aligned, the others are right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(
        file=io.StringIO(), width=MAX_WIDTH, force_terminal=sys.stdout.isatty(), markup=False, highlight=False,
        emoji=False,
    )  # fmt: skip
    with console.capture() as capture:
        console.print(Padding(table, (0, 0, 0, 2), expand=False))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def format_summaries(title: str, summaries: Sequence[tuple[str, Summary]]) -> str:
    """Returns a table with one row per named summary."""
    return format_table([title, *SUMMARY_COLUMNS], [[name, *summary_cells(summary)] for name, summary in summaries])


def summary_cells(summary: Summary) -> list[str]:
    """Returns the cells of a table row for a summary: its values in the order of ``SUMMARY_COLUMNS``."""
    return [format_number(getattr(summary, column)) for column in SUMMARY_COLUMNS]


def progress_bar(stream: TextIO = sys.stderr) -> Progress:
    """Returns a progress bar, which disappears at the end. The bar shows nothing if ``stream`` is not a terminal.

    The field ``note`` of a task is a text that is shown after the bar.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    return Progress(*columns, console=Console(file=stream), transient=True, disable=not stream.isatty())
