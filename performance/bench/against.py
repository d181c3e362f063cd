"""Compares a benchmark of this source tree with the same benchmark of another tree, in alternating runs.

A machine's speed changes over minutes. Runs of both trees therefore alternate, and each ratio compares two consecutive
runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from performance.program import LoadTestError, UsageError, parse_count, write_json
from performance.terminal import format_number, format_table

__all__ = ["add_against_options", "compare_trees"]

REPOSITORY = Path(__file__).resolve().parents[2]
SHOWN_CHARS = 2000
"""Maximum length of a failed benchmark's output in the error."""


def add_against_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options ``--against`` (the other source tree) and ``--rounds`` to a benchmark's parser."""
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="compare with another tree (kernels built) in alternating runs"
    )
    parser.add_argument("--rounds", type=parse_count, default=5, help="with --against: runs of each tree (default 5)")


def compare_trees(
    script: str, arguments: Sequence[str] | None, name: str, figure: str, *, root: Path = REPOSITORY
) -> int:
    """Runs a benchmark script of both source trees and prints, for each row of its result, the ratio of the two trees.

    The options ``--against``, ``--rounds`` and ``--json`` in ``arguments`` belong to the comparison. The script gets
    all other options. In the script's JSON, each row has the key ``name``, which identifies the row, and the key
    ``figure``, whose values are compared. A ratio is this tree's value divided by the other tree's value. For each row,
    the median, smallest and largest ratio of all rounds are printed. Raises LoadTestError if a run fails.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_against_options(parser)
    parser.add_argument("--json", type=Path)
    own, forwarded = parser.parse_known_args(arguments)
    trees = {"this": root, "other": own.against.resolve()}
    if not (trees["other"] / script).is_file():
        raise UsageError(f"--against: {own.against} has no {script}")
    runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for index in range(own.rounds):
        for tree in sorted(trees, reverse=index % 2 == 0):
            print(f"round {index + 1}/{own.rounds}: {tree} tree", file=sys.stderr, flush=True)
            runs[tree].append(_figures(trees[tree], script, forwarded, name, figure))
    rows = []
    for row in runs["this"][0]:
        this, other = ([run[row] for run in runs[tree]] for tree in ("this", "other"))
        ratios = sorted(one / another for one, another in zip(this, other, strict=True))
        medians = {"this": statistics.median(this), "other": statistics.median(other)}
        rows.append({"name": row, **medians, "ratio": statistics.median(ratios), "ratios": ratios})
    ratio = statistics.geometric_mean(row["ratio"] for row in rows)
    print(_table(rows, figure))
    print(f"\n  ratio of {figure}, geometric mean of the rows: {ratio:.3f} (below 1 this tree is faster)")
    write_json(own.json, {"against": str(own.against), "figure": figure, "ratio": ratio, "rows": rows})
    return 0


def _figures(tree: Path, script: str, arguments: Sequence[str], name: str, figure: str) -> dict[str, float]:
    """Runs the script once in a source tree. Returns the value of ``figure`` in each row, by the row's name."""
    with tempfile.TemporaryDirectory(prefix="against_") as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, str(tree / script), *arguments, "--json", str(path)]
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        if result.returncode != 0 or not path.is_file():
            raise LoadTestError(f"{tree / script} failed with {result.returncode}:\n{result.stderr[-SHOWN_CHARS:]}")
        return {str(row[name]): float(row[figure]) for row in json.loads(path.read_text())["rows"]}


def _table(rows: Sequence[dict[str, float | list[float]]], figure: str) -> str:
    header = [figure, "this tree", "other tree", "ratio", "smallest", "largest"]
    lines = []
    for row in rows:
        ratios = (row["ratio"], row["ratios"][0], row["ratios"][-1])
        lines.append(
            [row["name"], format_number(row["this"]), format_number(row["other"]), *(f"{each:.3f}" for each in ratios)]
        )
    return format_table(header, lines)
