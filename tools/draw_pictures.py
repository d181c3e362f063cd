#!/usr/bin/env python3
"""Draws docs/pictures/peers.svg and docs/pictures/batching_modes.svg; with --check, exits with 1 if one is out of date.

The bars of peers.svg come from peers.json. The README states the runs of these ratios. A complete run of
``performance/compare_peers.py --auto`` replaces both files. The other pictures of that folder are written by hand.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from performance.peers.auto.picture import COLOURS, draw, read_comparisons, svg_document, svg_text

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"


@dataclass(frozen=True)
class Request:
    """A request of the illustration: the step at which it arrives, and the number of steps that it needs."""

    arrival: int
    steps: int


REQUESTS = [
    Request(*each) for each in ((0, 3), (0, 9), (0, 5), (1, 7), (2, 4), (3, 8), (5, 3), (7, 5), (8, 4), (10, 3))
]
NUM_ROWS = 4
"""Number of batch rows in the picture of the batching modes."""
WAIT = 2
"""Number of steps for which a dynamic batch waits for more requests."""

Span = tuple[int, int, int, int]
"""A request's place in the picture: request number, batch row, first step, and the step after its last step."""


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
    """Returns the requests that start together when the device becomes free at ``now``."""
    if mode == "none":
        return waiting[:1]
    latest = max(now, REQUESTS[waiting[0]].arrival + (WAIT if mode == "dynamic" else 0))
    return [one for one in waiting[:NUM_ROWS] if REQUESTS[one].arrival <= latest]


def batching_picture() -> str:
    """Returns the timeline of the batching modes as SVG."""
    unit, height, left, top = 15, 14, 120, 46
    modes = {mode: schedule(mode) for mode in ("none", "static", "dynamic", "continuous")}
    width = left + unit * max(span[3] for spans in modes.values() for span in spans) + 20
    parts = [
        svg_text(
            left, 22, "ten requests, four batch rows; a bar is a request, a gap is an empty batch row", "start", 13
        )
    ]
    y = top
    for mode, spans in modes.items():
        end = max(span[3] for span in spans)
        rows = 1 if mode == "none" else NUM_ROWS
        middle = y + rows * (height + 2) // 2
        parts.append(svg_text(left - 10, middle, mode, "end", 13, bold=True))
        parts.append(svg_text(left - 10, middle + 14, f"{end} steps", "end", 11))
        parts.append(f'<rect x="{left}" y="{y}" width="{unit * end}" height="{rows * (height + 2)}" fill="#eceff1"/>')
        for one, row, begin, after in spans:
            x, bar_y = left + unit * begin, y + row * (height + 2)
            parts.append(
                f'<rect x="{x}" y="{bar_y}" width="{unit * (after - begin) - 1}" height="{height}" rx="2" '
                f'fill="{COLOURS[one]}"/>'
            )
            parts.append(svg_text(x + 4, bar_y + 11, str(one + 1), "start", 10, colour="#ffffff"))
        y += rows * (height + 2) + 18
    return svg_document(width, y, "Timeline of the batching modes", parts)


def peers_picture() -> str:
    """Returns the bars of peers.json as SVG."""
    return draw(read_comparisons((FOLDER / "peers.json").read_text(encoding="utf-8")))


def main() -> int:
    """Writes or checks the pictures; returns 1 if one is out of date."""
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
