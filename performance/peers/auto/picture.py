"""Draws the bar chart of our rate relative to the fastest peer, as SVG."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FONT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
COLOURS = ("#1565c0", "#ef6c00", "#2e7d32", "#6a1b9a", "#c62828", "#00838f", "#9e9d24", "#5d4037", "#ad1457", "#455a64")
MIN_SCALE = 2.5
"""The axis of ratios reaches at least this value."""


def write_picture(path: Path, spans: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Writes the picture, and its numbers into a JSON file of the same name."""
    path.with_suffix(".json").write_text(json.dumps(spans, indent=2) + "\n", encoding="utf-8")
    path.write_text(draw_spans(spans), encoding="utf-8")


def draw_spans(spans: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Returns the picture.

    ``spans`` has the smallest and the largest ratio of the rounds, by precision (outer key) and batch size (inner key).
    """
    unit, left, bar, top = 170, 150, 16, 60
    most = max([MIN_SCALE, *(largest for rows in spans.values() for _, largest in rows.values())])
    width = left + int((most + 0.55) * unit)
    height = top + sum(len(rows) * (bar + 8) + 34 for rows in spans.values())
    parts = [svg_text(left, 22, "decode rate / rate of the fastest peer; bars span all rounds", "start", 13)]
    for tick in (0.5 * number for number in range(1, int(2 * most) + 1)):
        x = left + int(tick * unit)
        colour, dash = ("#c62828", "") if tick == 1.0 else ("#cfd8dc", ' stroke-dasharray="3 3"')
        parts.append(f'<path d="M{x} {top - 14} V{height - 10}" stroke="{colour}"{dash}/>')
        parts.append(svg_text(x, top - 20, f"{tick:g}", "middle", 11))
    y = top
    for colour, (precision, rows) in zip(COLOURS, spans.items(), strict=False):
        parts.append(svg_text(16, y + 12, precision, "start", 13, bold=True))
        y += 6
        for batch, (least, largest) in rows.items():
            x, length = left + int(least * unit), int((largest - least) * unit)
            parts.append(svg_text(left - 10, y + 12, f"batch {batch}", "end", 12))
            parts.append(f'<rect x="{x}" y="{y}" width="{length}" height="{bar}" rx="3" fill="{colour}"/>')
            parts.append(svg_text(x + length + 6, y + 12, f"{least:.3g} to {largest:.3g}", "start", 11))
            y += bar + 8
        y += 28
    return svg_document(width, height, "Decode rate relative to the fastest peer", parts)


def svg_text(x: int, y: int, text: str, anchor: str, size: int, *, bold: bool = False, colour: str = "#212121") -> str:
    """Returns a line of text. ``anchor`` is ``start``, ``middle`` or ``end``."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{weight} fill="{colour}">{text}</text>'


def svg_document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Returns an SVG file of ``parts`` on a white background."""
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>\n  <title>{title}</title>\n'
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>\n  {body}\n</svg>\n'
    )
