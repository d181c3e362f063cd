"""Calculates ratios of this server to its peers, from rounds in which each program ran once."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from performance.peers.auto.programs import Program
from performance.terminal import format_number, format_table

Round = Mapping[str, Mapping[str, float]]
"""Tokens per second by program (outer key) and row (inner key), such as ``batch 8``."""


@dataclass(frozen=True, slots=True)
class Span:
    """The range of a ratio: this server's rate divided by that of the fastest peer.

    The range includes only rounds in which all ``peers`` have a rate.
    """

    least: float
    largest: float
    rounds: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one precision: ranges of the ratio by row, and peers that have no rate in any round."""

    spans: dict[str, Span]
    """The range of each row, such as ``batch 8`` or ``prefill 1024``."""
    missing: tuple[str, ...]
    rounds: int
    """Number of rounds that were run."""


def ratios(rounds: Sequence[Round], ours: str, theirs: str, row: str) -> list[float]:
    """Returns the rate of this server divided by a peer's rate, for each round that has both rates."""
    return [
        each[ours][row] / each[theirs][row]
        for each in rounds
        if row in each.get(ours, {}) and row in each.get(theirs, {})
    ]


def ratios_to_fastest(rounds: Sequence[Round], programs: Sequence[Program], ours: Program, row: str) -> list[float]:
    """Returns, for each complete round, our rate divided by the rate of the fastest peer with the same precision.

    ``row`` is the name of a measured row, such as a decode. A round is complete if it has the rates of all peers that
    have this row in any round. Without the fastest peer, the ratio of a round would be too large.
    """
    peers = peers_of(rounds, programs, ours, row)
    complete = [each for each in rounds if all(row in each.get(name, {}) for name in (ours.name, *peers))]
    return [each[ours.name][row] / max(each[peer][row] for peer in peers) for each in complete] if peers else []


def peers_of(rounds: Sequence[Round], programs: Sequence[Program], ours: Program, row: str) -> tuple[str, ...]:
    """Returns the names of the peers with the precision of ``ours`` that have the row in any round."""
    return tuple(
        program.name
        for program in programs
        if program.precision == ours.precision
        and program.kind != "ours"
        and any(row in each.get(program.name, {}) for each in rounds)
    )


def table(rounds: Sequence[Round], programs: Sequence[Program], isa: str | None = None) -> str:
    """Returns two tables: the median rate of each program, and our ratios to each peer with their range.

    The tables name the instruction set ``isa`` that all programs were limited to.
    """
    limit = "" if isa is None else f" with {isa}"
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
        (
            format_table([f"tokens/s{limit} (median)", *rows], rates),
            format_table([f"ratio{limit} (smallest to largest)", *rows], lines),
        )
    )


def comparisons(rounds: Sequence[Round], programs: Sequence[Program]) -> dict[str, Comparison]:
    """Returns the comparison with the fastest peer in all rows, by precision.

    ``programs`` has all programs that the run should compare, including those whose set-up failed.
    """
    found: dict[str, Comparison] = {}
    for ours in (program for program in programs if program.kind == "ours"):
        spans, measured = {}, set[str]()
        for row in dict.fromkeys(row for each in rounds for row in each.get(ours.name, {})):
            peers = peers_of(rounds, programs, ours, row)
            values = ratios_to_fastest(rounds, programs, ours, row)
            if values:
                measured |= set(peers)
                spans[row] = Span(min(values), max(values), len(values), peers)
        missing = tuple(
            program.name
            for program in programs
            if program.precision == ours.precision and program.kind != "ours" and program.name not in measured
        )
        found[ours.precision] = Comparison(spans, missing, len(rounds))
    return found


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"
