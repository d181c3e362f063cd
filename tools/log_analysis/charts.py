"""Draws charts over a common time axis as one inline SVG, without scripts, fonts or other files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, CHART_INCHES = 9.2, 2.0
"""Width of the charts and height of each chart, in inches."""
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
FIXED = {"svg.hashsalt": "log", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 8}
"""Settings of matplotlib. With them, equal data gives equal files, and text is stored as text instead of curves."""


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (seconds, value). Points more than ``gap_s`` apart are not joined."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    gap_s: float = math.inf
    filled: bool = False


def charts_svg(charts: Sequence[tuple[str, Sequence[Line]]], duration_s: float, marks: Sequence[float]) -> str:
    """Draws charts (title, lines) below each other. Time begins at 0; ``marks`` are times of dashed vertical lines."""
    # Imported here, because a report without charts does not need matplotlib.
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    unit, unit_name = next((each for each in UNITS if duration_s >= 2 * each[0]), UNITS[-1])
    with matplotlib.rc_context(FIXED):
        figure = Figure(figsize=(WIDTH_INCHES, CHART_INCHES * len(charts)), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(len(charts), 1, squeeze=False)[:, 0]
        for axes, (title, lines) in zip(panels, charts, strict=True):
            axes.set_title(title, loc="left", fontweight="bold", parse_math=False)
            axes.grid(alpha=0.3)
            for mark in marks:
                axes.axvline(mark / unit, color="#a0aec0", linestyle="--", linewidth=1)
            for line in lines:
                _draw(axes, line, unit)
            axes.set_xlim(0, max(duration_s, 1e-9) / unit)
            axes.set_ylim(bottom=0)
            if len(lines) > 1:
                axes.legend(frameon=False, ncols=len(lines), loc="lower right", bbox_to_anchor=(1, 0.98))
        panels[-1].set_xlabel(unit_name)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Axes, line: Line, unit: float) -> None:
    """Draws a series, interrupted at gaps. A single point between two gaps is drawn as a dot."""
    pieces: list[list[tuple[float, float]]] = []
    for seconds, value in line.points:
        if not pieces or seconds - unit * pieces[-1][-1][0] > line.gap_s:
            pieces.append([])
        pieces[-1].append((seconds / unit, value))
    for index, piece in enumerate(pieces or [[]]):
        times, values = [time for time, _ in piece], [value for _, value in piece]
        marker = "o" if len(piece) == 1 else None
        label = None if index else line.name
        axes.plot(times, values, color=line.colour, linewidth=1.3, marker=marker, markersize=2, label=label)
        if line.filled:
            axes.fill_between(times, values, color=line.colour, alpha=0.15, linewidth=0)
