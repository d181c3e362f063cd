"""Simulated runs as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from performance.load.report import figure_tables, goodput_text, objective_text
from performance.simulation.options import SimulationOptions
from performance.simulation.runs import SimulatedRun
from performance.terminal import format_number, format_table

__all__ = ["comparison_table", "result_json", "run_text", "run_title"]

COLUMNS = (
    "",
    "total s",
    "tokens/s",
    "TTFT p50 ms",
    "p99",
    "TBT p50 ms",
    "p99",
    "goodput %",
    "failed",
    "preempted",
    "KV waste %",
    "found %",
    "device %",
)


def run_title(simulated: SimulatedRun) -> str:
    """One line: what was run."""
    options = simulated.run.options
    return (
        f"simulated on {simulated.device}: {simulated.run.model}, {simulated.name}: {options.rate:g} requests/s "
        f"({options.arrivals}) for {options.duration:g} s, seed {options.seed}"
    )


def run_text(simulated: SimulatedRun) -> str:
    """What the load test prints, and what only the server's side knows."""
    figures, outcome = simulated.figures, simulated.outcome
    steps = ", ".join(f"{count} {kind}" for kind, count in outcome.steps.items())
    lines = [
        goodput_text(simulated.run.options, figures),
        f"steps    {steps}; the device was busy {100 * simulated.device_share:.0f} % of the time",
        f"cache    {outcome.preemptions} preemptions ({outcome.swaps} by swap); {outcome.prefix_hit_tokens} prompt "
        f"tokens found; {100 * outcome.kv_waste:.1f} % of what running sequences held "
        f"was empty; at most {outcome.peak_running} ran and {outcome.peak_waiting} waited",
        *(
            f"replica {index}: {sum(placed.values())} requests placed ("
            + ", ".join(f"{number} by {why}" for why, number in placed.items())
            + ")"
            for index, placed in enumerate(outcome.placed)
        ),
    ]
    parts = [
        run_title(simulated),
        f"All Tasks Done; Exec Time is {figures.total_time_s:.2f} s (virtual; {simulated.cpu_s:.1f} s of CPU time)",
        *figure_tables(figures),
        "\n".join(f"  {line}" for line in lines),
    ]
    return "\n\n".join(parts)


def comparison_table(runs: Sequence[SimulatedRun]) -> str:
    """One line a run."""
    rows = []
    for each in runs:
        figures = each.figures
        numbers = (
            figures.total_time_s,
            figures.output_tokens_per_s,
            figures.ttft_ms.p50,
            figures.ttft_ms.p99,
            figures.tbt_ms.p50,
            figures.tbt_ms.p99,
            100 * figures.goodput_fraction,
        )
        rows.append(
            [
                each.name,
                *(format_number(number) for number in numbers),
                str(figures.failed),
                str(each.outcome.preemptions),
                format_number(100 * each.outcome.kv_waste),
                format_number(100 * each.outcome.prefix_hit_share),
                format_number(100 * each.device_share),
            ]
        )
    return f"{format_table(COLUMNS, rows)}\n\n  goodput: {objective_text(runs[0].run.options)}"


def result_json(options: SimulationOptions, runs: Sequence[SimulatedRun], rates: dict[str, Any]) -> dict[str, Any]:
    """``policies``: by name, the load test's keys of each run. Sweeps leave ``per_request`` out."""
    return {
        "config": options.config,
        "device": options.device,
        "settings": list(options.settings),
        "rate": options.load.rate,
        "duration_s": options.load.duration,
        "seed": options.load.seed,
        "policies": {each.name: each.as_json(per_request=not options.sweeps) for each in runs},
        **({"rates": rates} if rates else {}),
    }
