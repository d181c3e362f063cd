"""Presents simulated runs as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from performance.load.report import COLUMNS, figure_tables, goodput_text, objective_text
from performance.simulation.cluster import ClusterOutcome
from performance.simulation.options import SimulationOptions
from performance.simulation.runs import SimulatedRun
from performance.simulation.server import Outcome
from performance.terminal import format_number, format_table

__all__ = ["comparison_table", "result_json", "run_text", "run_title"]

MAX_SHOWN = 16
"""Maximum number of replicas in the report of a run."""
SHOWN = ("total s", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", "TBT p50 ms", "TBT p99 ms", "goodput %", "failed")
SERVER_COLUMNS: dict[str, Callable[[SimulatedRun], float]] = {
    "preempted": lambda run: run.outcome.preemptions,
    "KV waste %": lambda run: 100 * run.outcome.kv_waste,
    "prefix hit %": lambda run: 100 * run.outcome.prefix_hit_share,
    "device %": lambda run: 100 * run.device_share,
}
"""Columns of the comparison table for values that only the server knows. A real client cannot measure them."""


def run_title(simulated: SimulatedRun) -> str:
    """Returns a line that describes a simulated run: device, model, policy, load and seed."""
    options = simulated.run.options
    return (
        f"simulated on {simulated.device}: {simulated.run.model}, {simulated.name}: {options.rate:g} requests/s "
        f"({options.arrivals}) for {options.duration:g} s, seed {options.seed}"
    )


def run_text(simulated: SimulatedRun) -> str:
    """Returns the report of a simulated run.

    The report is that of a load test, and also has counts that a real client cannot see, such as steps and preemptions.
    """
    figures, outcome = simulated.figures, simulated.outcome
    steps = ", ".join(f"{count} {kind}" for kind, count in outcome.steps.items())
    lines = [
        goodput_text(simulated.run.options, figures),
        f"steps    {steps}; the device was busy {100 * simulated.device_share:.0f} % of the time",
        f"cache    {outcome.preemptions} preemptions ({outcome.swaps} by swap); {outcome.prefix_hit_tokens} prompt "
        f"tokens found; {100 * outcome.kv_waste:.1f} % of the running sequences' token positions "
        f"were empty; maximum {outcome.peak_running} running, {outcome.peak_waiting} waiting",
        *_hand_over_lines(outcome),
        *(outcome.lines() if isinstance(outcome, ClusterOutcome) else ()),
        *(
            f"replica {index}: {sum(placed.values())} requests placed ("
            + ", ".join(f"{number} by {why}" for why, number in placed.items())
            + ")"
            for index, placed in enumerate(outcome.placed[:MAX_SHOWN])
        ),
    ]
    parts = [
        run_title(simulated),
        f"All Tasks Done; Exec Time is {figures.total_time_s:.2f} s (virtual; {simulated.cpu_s:.1f} s of CPU time)",
        *figure_tables(figures),
        "\n".join(f"  {line}" for line in lines),
    ]
    return "\n\n".join(parts)


def _hand_over_lines(outcome: Outcome) -> list[str]:
    """Returns a line about hand-overs between replicas, or no line if the replicas have no roles."""
    figures = outcome.hand_overs
    if not figures:
        return []
    completed, threshold = figures["completed"], figures["threshold_tokens"]
    mean = 1000 * figures["seconds"] / completed if completed else 0.0
    learned = "they do not pay" if threshold < 0 else f"threshold {threshold:.0f} tokens"
    return [
        f"roles    {completed:.0f} hand-overs of {figures['blocks']:.0f} blocks, {mean:.1f} ms on average; "
        f"{figures['misses']:.0f} missed, {figures['reloads']:.0f} loaded again; {learned}"
    ]


def comparison_table(runs: Sequence[SimulatedRun]) -> str:
    """Returns a table with one row per run."""
    rows = []
    for run in runs:
        numbers = [*(COLUMNS[name](run.figures) for name in SHOWN), *(each(run) for each in SERVER_COLUMNS.values())]
        rows.append([run.name, *(format_number(number) for number in numbers)])
    table = format_table(["", *SHOWN, *SERVER_COLUMNS], rows)
    return f"{table}\n\n  goodput: {objective_text(runs[0].run.options)}"


def result_json(options: SimulationOptions, runs: Sequence[SimulatedRun], rates: dict[str, Any]) -> dict[str, Any]:
    """Returns all runs as JSON. The object ``policies`` maps the name of each run to the JSON of the run.

    If ``--sweep`` varies settings, the JSON of a run does not list its requests.
    """
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
