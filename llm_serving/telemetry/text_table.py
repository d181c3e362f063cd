"""Aligned plain-text tables for the command-line tools."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.telemetry.statistics import Summary

SUMMARY_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def format_number(value: float | None) -> str:
    """Three to four significant digits, without exponent; ``-`` for no value."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    if magnitude >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """The first column to the left, the others to the right; no trailing spaces, no final newline."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        (
            indent
            + "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        ).rstrip()
        for line in lines
    )


def format_summaries(title: str, summaries: Sequence[tuple[str, Summary]]) -> str:
    """A table with one line for each named summary: mean, p50, p90, p99 and maximum."""
    rows = []
    for name, summary in summaries:
        figures = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
        rows.append([name, *(format_number(figure) for figure in figures)])
    return format_table([title, *SUMMARY_COLUMNS], rows)
