"""Small things the benchmarks share: lists on the command line, medians, the JSON of a run."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def parse_counts(text: str) -> tuple[int, ...]:
    """``1,8,32``: whole numbers from 1 on."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers above 0, separated by commas")
    return counts


def parse_count(text: str) -> int:
    """One whole number from 1 on."""
    counts = parse_counts(text)
    if len(counts) != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one number")
    return counts[0]


def median_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figure by figure; what is no number (or is the same everywhere) is taken from the first."""
    first = rows[0]
    return {
        key: statistics.median(row[key] for row in rows) if isinstance(value, float) else value
        for key, value in first.items()
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
