"""A load held against reality, part by part, as text and as JSON."""

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
    """All tries of each part, and the figures of those that count."""

    load: Load
    parts: list[list[Try]]
    rows: list[Compared]

    @property
    def is_steady(self) -> bool:
        return is_evidence(self.parts)

    def counts(self, one: Try) -> bool:
        """Whether the figures are of this try, too."""
        return any(one is other for other in comparable(self.parts))

    def as_json(self) -> dict[str, Any]:
        return {
            "steady": self.is_steady,
            "figures": {row.name: row.as_json() for row in self.rows},
            "parts": [[one.as_json() | {"compared": self.counts(one)} for one in tries] for tries in self.parts],
        }


def result_text(result: ComparedLoad, scale: float) -> str:
    """What ran, how steadily, and the comparison."""
    load = result.load
    options = load.options(scale)
    lines = [
        f"{load.name}: {options.rate:g} requests/s for {load.parts} times {options.duration:g} s, prompts of"
        f" {load.prompts[0]} to {load.prompts[1]} tokens, answers of {load.outputs[0]} to {load.outputs[1]}",
        "  all steps of the probes (of few rows, of many, and with prompts) took so many times what the fit says:",
    ]
    for part, tries in enumerate(result.parts):
        for one in tries:
            told = "" if one.is_steady else ", not steady"
            told += ", compared" if result.counts(one) else ", thrown away"
            lines.append(
                f"  part {part}: {_speeds(one.before)} right before it, {_speeds(one.after)} right after;"
                f" others took {one.others:.1%} of the cores' time{told}"
            )
    return "\n".join(lines) + f"\n\n{comparison_text(result.rows)}\n"


def _speeds(probe: Probe) -> str:
    slow = probe.slowdown
    return f"{slow.steps:.3f} ({slow.few_rows:.3f}, {slow.many_rows:.3f}, {slow.prompts:.3f})"


def closing_text(results: Sequence[ComparedLoad]) -> str:
    """How many figures are within the goal, of the loads for which the machine was steady."""
    off = [abs(row.error) for one in results if one.is_steady for row in one.rows]
    unsteady = [one.load.name for one in results if not one.is_steady]
    lines = []
    if off:
        name = "all loads" if not unsteady else "loads while the machine was steady"
        within = sum(error <= GOAL for error in off)
        lines.append(f"{name}: {within} of {len(off)} figures within {GOAL:.0%}, the worst is off by {max(off):.0%}")
    if unsteady:
        lines.append(
            f"no evidence, as in every try of half of the parts probes were more than {TOLERANCE:.0%} apart, or others"
            f" took more than {OTHERS_TOLERANCE:.0%} of the cores' time: {', '.join(unsteady)}"
        )
    return "\n".join(lines)


def comparison_json(results: Sequence[ComparedLoad]) -> dict[str, Any]:
    """For programs."""
    return {
        "goal": GOAL,
        "tolerance": TOLERANCE,
        "others_tolerance": OTHERS_TOLERANCE,
        "loads": {one.load.name: one.as_json() for one in results},
    }
