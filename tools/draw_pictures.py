#!/usr/bin/env python3
"""Draws docs/pictures/peers.svg and docs/pictures/batching_modes.svg; with --check, exits with 1 if one is out of date.

The other pictures of that folder are written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
FONT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
COLOURS = ("#1565c0", "#ef6c00", "#2e7d32", "#6a1b9a", "#c62828", "#00838f", "#9e9d24", "#5d4037", "#ad1457", "#455a64")

PEERS = {
    "int8": {"1": (1.1, 1.5), "8": (1.9, 2.4), "32": (1.45, 1.9), "64": (1.7, 2.0), "128": (1.45, 2.0)},
    "bfloat16": {"1": (1.4, 2.5), "8": (1.5, 1.9), "32": (1.55, 1.9), "64": (0.57, 2.0), "128": (1.2, 1.55)},
}
"""This server's decode rate divided by the fastest other server's, by weight format and batch size.

The two numbers are the smallest and the largest of five measurements (docs/lab).
"""


@dataclass(frozen=True)
class Request:
    """A request of the illustration: when it arrives and how many steps it needs."""

    arrival: int
    steps: int


REQUESTS = [
    Request(*each) for each in ((0, 3), (0, 9), (0, 5), (1, 7), (2, 4), (3, 8), (5, 3), (7, 5), (8, 4), (10, 3))
]
NUM_ROWS = 4
WAIT = 2
"""Number of steps for which a dynamic batch waits for more requests."""

Span = tuple[int, int, int, int]
"""A request's place in the picture: request number, batch row, first step, and the step after the last."""


def schedule(mode: str) -> list[Span]:
    """Returns the steps and the batch row in which each request of the illustration runs in a batching mode."""
    free = [0] * NUM_ROWS
    spans: list[Span] = []
    waiting = list(range(len(REQUESTS)))
    while waiting:
        if mode in ("none", "static", "dynamic"):
            batch = _next_batch(mode, waiting, max(free))
            begin = max(max(free), *(REQUESTS[one].arrival for one in batch))
            if mode == "dynamic" and len(batch) < NUM_ROWS:
                begin = max(max(free), REQUESTS[batch[0]].arrival + WAIT)
            spans += [(one, row, begin, begin + REQUESTS[one].steps) for row, one in enumerate(batch)]
            free = [max(span[3] for span in spans)] * NUM_ROWS
            waiting = waiting[len(batch) :]
        else:
            one = waiting.pop(0)
            row = min(range(NUM_ROWS), key=lambda each: max(free[each], REQUESTS[one].arrival))
            begin = max(free[row], REQUESTS[one].arrival)
            free[row] = begin + REQUESTS[one].steps
            spans.append((one, row, begin, free[row]))
    return spans


def _next_batch(mode: str, waiting: list[int], now: int) -> list[int]:
    """Return the requests that start together when the device becomes free at ``now``."""
    if mode == "none":
        return waiting[:1]
    latest = max(now, REQUESTS[waiting[0]].arrival + (WAIT if mode == "dynamic" else 0))
    return [one for one in waiting[:NUM_ROWS] if REQUESTS[one].arrival <= latest]


def batching_picture() -> str:
    """Return the timeline of the batching modes as SVG."""
    unit, height, left, top = 15, 14, 120, 46
    modes = {mode: schedule(mode) for mode in ("none", "static", "dynamic", "continuous")}
    width = left + unit * max(span[3] for spans in modes.values() for span in spans) + 20
    parts = [
        _text(left, 22, "ten requests, four batch rows; a bar is a request, a gap is an empty batch row", "start", 13)
    ]
    y = top
    for mode, spans in modes.items():
        end = max(span[3] for span in spans)
        rows = 1 if mode == "none" else NUM_ROWS
        middle = y + rows * (height + 2) // 2
        parts.append(_text(left - 10, middle, mode, "end", 13, bold=True))
        parts.append(_text(left - 10, middle + 14, f"{end} steps", "end", 11))
        parts.append(f'<rect x="{left}" y="{y}" width="{unit * end}" height="{rows * (height + 2)}" fill="#eceff1"/>')
        for one, row, begin, after in spans:
            x, bar_y = left + unit * begin, y + row * (height + 2)
            parts.append(
                f'<rect x="{x}" y="{bar_y}" width="{unit * (after - begin) - 1}" height="{height}" rx="2" '
                f'fill="{COLOURS[one]}"/>'
            )
            parts.append(_text(x + 4, bar_y + 11, str(one + 1), "start", 10, colour="#ffffff"))
        y += rows * (height + 2) + 18
    return _svg(width, y, "Timeline of the batching modes", parts)


def peers_picture() -> str:
    """Returns an SVG with bars of this server's decode rate relative to the fastest other server."""
    unit, left, bar, top = 170, 150, 16, 60
    width, height = left + int(3.05 * unit), top + sum(len(rows) * (bar + 8) + 34 for rows in PEERS.values())
    parts = [_text(left, 22, "decode rate / rate of the fastest peer; bars span five rounds", "start", 13)]
    for tick in (0.5, 1.0, 1.5, 2.0, 2.5):
        x = left + int(tick * unit)
        colour, dash = ("#c62828", "") if tick == 1.0 else ("#cfd8dc", ' stroke-dasharray="3 3"')
        parts.append(f'<path d="M{x} {top - 14} V{height - 10}" stroke="{colour}"{dash}/>')
        parts.append(_text(x, top - 20, f"{tick:g}", "middle", 11))
    y = top
    for colour, (kind, rows) in zip(COLOURS, PEERS.items(), strict=False):
        parts.append(_text(16, y + 12, kind, "start", 13, bold=True))
        y += 6
        for batch, (least, largest) in rows.items():
            x, length = left + int(least * unit), int((largest - least) * unit)
            parts.append(_text(left - 10, y + 12, f"batch {batch}", "end", 12))
            parts.append(f'<rect x="{x}" y="{y}" width="{length}" height="{bar}" rx="3" fill="{colour}"/>')
            parts.append(_text(x + length + 6, y + 12, f"{least:g} to {largest:g}", "start", 11))
            y += bar + 8
        y += 28
    return _svg(width, height, "Decode rate relative to the fastest peer", parts)


def _text(x: int, y: int, text: str, anchor: str, size: int, *, bold: bool = False, colour: str = "#212121") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{weight} fill="{colour}">{text}</text>'


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>\n  <title>{title}</title>\n'
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>\n  {body}\n</svg>\n'
    )


def main() -> int:
    """Write or check the pictures; return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a picture is out of date")
    options = parser.parse_args()
    stale = []
    for name, text in (("peers.svg", peers_picture()), ("batching_modes.svg", batching_picture())):
        path = FOLDER / name
        if options.check:
            stale += [] if path.is_file() and path.read_text(encoding="utf-8") == text else [name]
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run: make docs\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
