"""Ratios of this server to its peers, from rounds in which each program ran once."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from performance.peers.auto.programs import Program
from performance.terminal import format_number, format_table

Round = Mapping[str, Mapping[str, float]]
"""Tokens per second by program (outer key) and row (inner key), such as ``batch 8``."""

Span = tuple[float, float]
"""The smallest and the largest ratio of the rounds."""


def ratios(rounds: Sequence[Round], ours: str, theirs: str, row: str) -> list[float]:
    """Returns our rate divided by a peer's, of each round that has both."""
    return [
        each[ours][row] / each[theirs][row]
        for each in rounds
        if row in each.get(ours, {}) and row in each.get(theirs, {})
    ]


def ratios_to_fastest(rounds: Sequence[Round], programs: Sequence[Program], ours: Program, row: str) -> list[float]:
    """Returns our rate divided by that of the round's fastest peer with the same precision."""
    peers = [program.name for program in programs if program.precision == ours.precision and program.kind != "ours"]
    found = []
    for each in rounds:
        rates = [each[peer][row] for peer in peers if row in each.get(peer, {})]
        if rates and row in each.get(ours.name, {}):
            found.append(each[ours.name][row] / max(rates))
    return found


def table(rounds: Sequence[Round], programs: Sequence[Program]) -> str:
    """Returns two tables: the median rate of each program, and our ratios to each peer with their range."""
    rows = list(dict.fromkeys(row for each in rounds for rates in each.values() for row in rates))
    rates = []
    for program in programs:
        values = [[each[program.name][row] for each in rounds if row in each.get(program.name, {})] for row in rows]
        rates.append([program.name, *(format_number(statistics.median(of)) if of else "-" for of in values)])
    lines = []
    for ours in (program for program in programs if program.kind == "ours"):
        for peer in programs:
            if peer.precision == ours.precision and peer.kind != "ours":
                lines.append(
                    [f"{ours.name} / {peer.name}", *(_range(ratios(rounds, ours.name, peer.name, row)) for row in rows)]
                )
        lines.append(
            [f"{ours.name} / the fastest", *(_range(ratios_to_fastest(rounds, programs, ours, row)) for row in rows)]
        )
    return "\n\n".join(
        (format_table(["tokens/s (median)", *rows], rates), format_table(["ratio (smallest to largest)", *rows], lines))
    )


def spans(rounds: Sequence[Round], programs: Sequence[Program]) -> dict[str, dict[str, Span]]:
    """Returns the range of our ratio to the fastest peer, by precision (outer key) and batch size (inner key)."""
    found: dict[str, dict[str, Span]] = {}
    for ours in (program for program in programs if program.kind == "ours"):
        for row in dict.fromkeys(row for each in rounds for row in each.get(ours.name, {})):
            values = ratios_to_fastest(rounds, programs, ours, row)
            if row.startswith("batch ") and values:
                found.setdefault(ours.precision, {})[row.removeprefix("batch ")] = (min(values), max(values))
    return found


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"
