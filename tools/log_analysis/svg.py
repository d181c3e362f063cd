"""Line charts as inline SVG: no script, no outside resource."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 26, 26
TICKS = 5
MAX_TIME_STEPS = 8
MINUTE, HOUR, DAY = 60, 3600, 86400
TIME_STEPS = (
    *(0.1, 0.5, 1, 2, 5, 10, 20, 30),
    *(minutes * MINUTE for minutes in (1, 2, 5, 10, 20, 30)),
    *(hours * HOUR for hours in (1, 2, 3, 6, 12)),
    *(days * DAY for days in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (seconds, value). ``gap_s``: points further apart than this are not joined."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    gap_s: float = math.inf
    filled: bool = False


def chart(title: str, lines: Sequence[Line], duration_s: float, marks: Sequence[float] = ()) -> str:
    """All ``lines`` over one time axis from 0; ``marks`` are moments drawn as dashed lines."""
    top = _nice_top(max((value for line in lines for _, value in line.points), default=0.0))
    scale = _Scale(max(duration_s, 1e-9), top)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="15">{escape(title)}</text>',
        *_axes(scale),
        *(_mark(scale, mark) for mark in marks),
        *(_line(scale, line) for line in lines),
        _legend(lines),
        "</svg>",
    ]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Scale:
    duration_s: float
    top: float

    def x(self, seconds: float) -> float:
        return round(LEFT + min(seconds / self.duration_s, 1.0) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM), 1)


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for tick in range(TICKS):
        value = scale.top * tick / (TICKS - 1)
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
    step = _time_step(scale.duration_s)
    for tick in range(int(scale.duration_s / step) + 1):
        x = scale.x(tick * step)
        label = _duration(tick * step, step)
        parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
    return parts


def _line(scale: _Scale, line: Line) -> str:
    paths = []
    for piece in _pieces(line):
        corners = " L".join(f"{scale.x(seconds)} {scale.y(value)}" for seconds, value in piece)
        if line.filled:
            first, last = scale.x(piece[0][0]), scale.x(piece[-1][0])
            area = f"M{first} {scale.y(0)} L{corners} L{last} {scale.y(0)} Z"
            paths.append(f'<path d="{area}" fill="{line.colour}" opacity="0.15"/>')
        if len(piece) == 1:
            x, y = scale.x(piece[0][0]), scale.y(piece[0][1])
            paths.append(f'<circle cx="{x}" cy="{y}" r="2" fill="{line.colour}"/>')
        else:
            paths.append(f'<path d="M{corners}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>')
    return "\n".join(paths)


def _pieces(line: Line) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = []
    for point in line.points:
        if pieces and point[0] - pieces[-1][-1][0] <= line.gap_s:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _mark(scale: _Scale, seconds: float) -> str:
    x = scale.x(seconds)
    return f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


def _legend(lines: Sequence[Line]) -> str:
    """Nothing for a single line: the title names it."""
    if len(lines) < 2:
        return ""
    spans = "&#160;&#160;".join(f'<tspan fill="{line.colour}">{escape(line.name)}</tspan>' for line in lines)
    return f'<text class="legend" x="{WIDTH - RIGHT}" y="15" text-anchor="end">{spans}</text>'


def _nice_top(value: float) -> float:
    """The next of 1, 2, 4, 8, 10 times a power of ten: four steps of it have short labels."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 8, 10) if factor * power >= value * 0.999999)


def _time_step(duration_s: float) -> float:
    """A round time that divides the duration into at most eight steps."""
    return next((step for step in TIME_STEPS if duration_s / step <= MAX_TIME_STEPS), duration_s / 4)


def _duration(seconds: float, step: float) -> str:
    """``seconds`` in the unit that suits ``step``."""
    if step >= DAY:
        return f"{seconds / DAY:g} d"
    if step >= HOUR:
        return f"{seconds / HOUR:g} h"
    if step >= MINUTE:
        return f"{seconds / MINUTE:g} min"
    return f"{seconds:g} s"
