"""Draws an SVG bar chart: this server's rate divided by the fastest peer's rate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from performance.peers.auto.results import Comparison, Span

FONT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
COLOURS = ("#1565c0", "#ef6c00", "#2e7d32", "#6a1b9a", "#c62828", "#00838f", "#9e9d24", "#5d4037", "#ad1457", "#455a64")
WARNING = "#c62828"
AXIS = (0.5, 4.0)
"""Least and largest ratio on the horizontal axis. The axis is longer if a measured ratio lies outside."""
_DOUBLING, _LEFT, _BAR, _TOP = 140, 150, 16, 60
"""Pixels between a ratio and twice this ratio, of the left margin, of a bar's height, and of the top margin."""
_ROW, _LINE = _BAR + 8, 18
"""Heights in pixels of a bar and of a line of text, including the space below."""
_GAP, _CHARACTER = 6, 7
"""Space between a bar and its numbers, and the maximum width of a character, in pixels."""


def write_picture(path: Path, comparisons: Mapping[str, Comparison], isa: str | None = None) -> None:
    """Writes the picture, and its numbers into a JSON file of the same name. ``isa`` is as in ``draw``."""
    numbers = {precision: asdict(each) for precision, each in comparisons.items()}
    numbers_path(path).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    path.write_text(draw(comparisons, isa), encoding="utf-8")


def numbers_path(path: Path) -> Path:
    """Returns the path of the JSON file with the numbers of the picture ``path``. Both files are in one folder."""
    return path.with_suffix(".json")


def read_comparisons(text: str) -> dict[str, Comparison]:
    """Returns the comparisons of a JSON file that ``write_picture`` wrote, by precision."""

    def comparison(fields: dict[str, Any]) -> Comparison:
        spans = {row: Span(**{**each, "peers": tuple(each["peers"])}) for row, each in fields["spans"].items()}
        return Comparison(spans, tuple(fields["missing"]), fields["rounds"])

    return {precision: comparison(fields) for precision, fields in json.loads(text).items()}


def draw(comparisons: Mapping[str, Comparison], isa: str | None = None) -> str:
    """Returns the picture as SVG. The picture names the peers of each precision, and the peers that are missing from
    all or some bars. It also names the instruction set ``isa`` that all programs were limited to.
    """
    ticks = _ticks(comparisons)
    first = ticks[0]
    width = _LEFT + max([_pixels(ticks[-1], first) + 20, *(_width(each, first) for each in comparisons.values())])
    height = _TOP + sum(_height(each) for each in comparisons.values())
    limit = "that was measured" if isa is None else f"(all with {isa})"
    title = f"tokens per second / those of the fastest peer {limit}; bars span all rounds"
    parts = [svg_text(_LEFT, 22, title, "start", 13)]
    for tick in ticks:
        x = _LEFT + _pixels(tick, first)
        colour, dash = (WARNING, "") if tick == 1.0 else ("#cfd8dc", ' stroke-dasharray="3 3"')
        parts.append(f'<path d="M{x} {_TOP - 14} V{height - 10}" stroke="{colour}"{dash}/>')
        parts.append(svg_text(x, _TOP - 20, f"{tick:g}", "middle", 11))
    y = _TOP
    for colour, (precision, each) in zip(COLOURS, comparisons.items(), strict=False):
        parts += _section(y, colour, precision, each, first)
        y += _height(each)
    return svg_document(width, height, "Speed relative to the fastest peer", parts)


def _ticks(comparisons: Mapping[str, Comparison]) -> list[float]:
    """Returns the ratios that the axis names: powers of two, from below the least bar to above the largest one."""
    spans = [span for each in comparisons.values() for span in each.spans.values()]
    least = min([AXIS[0], *(span.least for span in spans)])
    largest = max([AXIS[1], *(span.largest for span in spans)])
    return [2.0**power for power in range(math.floor(math.log2(least)), math.ceil(math.log2(largest)) + 1)]


def _pixels(ratio: float, first: float) -> int:
    """Returns the distance of ``ratio`` from ``first``, the least ratio of the axis. The axis is logarithmic."""
    return int(math.log2(ratio / first) * _DOUBLING)


def _height(comparison: Comparison) -> int:
    return _LINE * (1 + bool(comparison.missing)) + _ROW * len(comparison.spans) + 22


def _peers(comparison: Comparison) -> tuple[str, ...]:
    """Returns the peers that have a rate in any of the bars."""
    return tuple(dict.fromkeys(name for span in comparison.spans.values() for name in span.peers))


def _width(comparison: Comparison, first: float) -> int:
    """Returns an upper limit of a section's width in pixels, without the column of row names on the left. ``first`` is
    the least ratio of the axis.
    """
    ends = [
        _pixels(span.largest, first) + _GAP + _CHARACTER * len(_label(span, _peers(comparison), comparison.rounds))
        for span in comparison.spans.values()
    ]
    names = (_peers(comparison), comparison.missing)
    return max([*ends, *(_CHARACTER * len(f"not measured: {', '.join(each)}") for each in names)])


def _section(y: int, colour: str, precision: str, comparison: Comparison, first: float) -> Iterable[str]:
    """Yields the SVG elements of one precision: its name, its peers, and a bar for each row of results. ``first`` is
    the least ratio of the axis.
    """
    peers = _peers(comparison)
    yield svg_text(16, y + 12, precision, "start", 13, bold=True)
    yield svg_text(_LEFT, y + 12, f"peers: {', '.join(peers) or 'none was measured'}", "start", 11)
    y += _LINE
    if comparison.missing:
        yield svg_text(_LEFT, y + 12, f"not measured: {', '.join(comparison.missing)}", "start", 11, colour=WARNING)
        y += _LINE
    for row, span in comparison.spans.items():
        x = _LEFT + _pixels(span.least, first)
        length = _LEFT + _pixels(span.largest, first) - x
        yield svg_text(_LEFT - 10, y + 12, row, "end", 12)
        yield f'<rect x="{x}" y="{y}" width="{length}" height="{_BAR}" rx="3" fill="{colour}"/>'
        yield svg_text(x + length + _GAP, y + 12, _label(span, peers, comparison.rounds), "start", 11)
        y += _ROW


def _label(span: Span, peers: tuple[str, ...], rounds: int) -> str:
    """Returns the text of a bar: the range of the ratio, the peers that it leaves out, and the number of rounds if some
    do not count.
    """
    parts = [f"{span.least:.3g} to {span.largest:.3g}"]
    absent = [name for name in peers if name not in span.peers]
    if absent:
        parts.append(f"without {', '.join(absent)}")
    if span.rounds < rounds:
        parts.append(f"{span.rounds} of {rounds} rounds")
    return "; ".join(parts)


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
