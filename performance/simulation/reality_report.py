"""Presents the comparison of simulations with real runs as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from performance.simulation.reality_loads import Load
from performance.simulation.steadiness import OTHERS_TOLERANCE, TOLERANCE, Probe, Try, comparable, is_evidence
from performance.simulation.validate import GOAL, Compared, comparison_text

__all__ = ["ComparedLoad", "closing_text", "comparison_json", "result_text"]


@dataclass(frozen=True, slots=True)
class ComparedLoad:
    """The result of a load: all tries of each of its parts, and the measured and simulated latencies and rates."""

    load: Load
    parts: list[list[Try]]
    rows: list[Compared]

    @property
    def is_steady(self) -> bool:
        return is_evidence(self.parts)

    def counts(self, one: Try) -> bool:
        """Returns True if the try ``one`` is compared with a simulation. False if the try was discarded."""
        return any(one is other for other in comparable(self.parts))

    def as_json(self) -> dict[str, Any]:
        return {
            "steady": self.is_steady,
            "figures": {row.name: row.as_json() for row in self.rows},
            "parts": [[one.as_json() | {"compared": self.counts(one)} for one in tries] for tries in self.parts],
        }


def result_text(result: ComparedLoad, scale: float) -> str:
    """Returns the result of a load as text.

    The text has the load's parameters, the slowdown of the machine before and after each part, and the comparison of
    measured and simulated values.
    """
    load = result.load
    options = load.options(scale)
    lines = [
        f"{load.name}: {options.rate:g} requests/s for {load.parts} times {options.duration:g} s, prompts of"
        f" {load.prompts[0]} to {load.prompts[1]} tokens, outputs of {load.outputs[0]} to {load.outputs[1]}",
        "  measured step time / fitted step time of the probes: all steps (few rows, many rows, prompts):",
    ]
    for part, tries in enumerate(result.parts):
        for one in tries:
            note = "" if one.is_steady else ", not steady"
            note += ", compared" if result.counts(one) else ", discarded"
            lines.append(
                f"  part {part}: {_speeds(one.before)} before it, {_speeds(one.after)} after it;"
                f" other processes took {one.others:.1%} of the cores' time{note}"
            )
    return "\n".join(lines) + f"\n\n{comparison_text(result.rows)}\n"


def _speeds(probe: Probe) -> str:
    slow = probe.slowdown
    return f"{slow.steps:.3f} ({slow.few_rows:.3f}, {slow.many_rows:.3f}, {slow.prompts:.3f})"


def closing_text(results: Sequence[ComparedLoad]) -> str:
    """Returns a sentence that states how many simulated values deviate from the measured values by at most ``GOAL``.

    Loads during which the speed of the machine changed too much do not count.
    """
    off = [abs(row.error) for one in results if one.is_steady for row in one.rows]
    unsteady = [one.load.name for one in results if not one.is_steady]
    lines = []
    if off:
        name = "all loads" if not unsteady else "loads while the machine was steady"
        within = sum(error <= GOAL for error in off)
        lines.append(f"{name}: {within} of {len(off)} figures within {GOAL:.0%}, the largest error is {max(off):.0%}")
    if unsteady:
        lines.append(
            f"discarded: {', '.join(unsteady)}: in half of the parts the probes always differed by more than"
            f" {TOLERANCE:.0%}, or other processes took more than {OTHERS_TOLERANCE:.0%} of the cores' time"
        )
    return "\n".join(lines)


def comparison_json(results: Sequence[ComparedLoad]) -> dict[str, Any]:
    """Returns the comparison of all loads as JSON."""
    return {
        "goal": GOAL,
        "tolerance": TOLERANCE,
        "others_tolerance": OTHERS_TOLERANCE,
        "loads": {one.load.name: one.as_json() for one in results},
    }
