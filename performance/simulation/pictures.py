"""Draws the pictures of ``docs/scheduling.md``: ``python -m performance.simulation.pictures docs``.

All simulations use the Ascend preset and the config ``llama_7b_kbk_pa_dyn.yaml`` (Llama 2 7B). The simulations take
seconds, and give the same result on every machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llm_serving.scheduler.limits import Policy
from performance.load.options import LoadOptions
from performance.load.stream import RequestRecord
from performance.load.workload import study_workload
from performance.simulation.batching import (
    BATCH_SIZE,
    BATCH_WAIT_S,
    MODES,
    OUTPUTS,
    PROMPT_LEN,
    VOCAB,
    mode_settings,
)
from performance.simulation.report import comparison_table
from performance.simulation.requests import generated, some_tokens
from performance.simulation.runs import NOWHERE, SimulatedRun, simulate
from performance.simulation.setup import make_setup
from performance.simulation.workload import ClosedLoop, OpenLoop, SimulatedRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONFIG, DEVICE = "llama_7b_kbk_pa_dyn.yaml", "ascend-910b"
PUBLISHED_LOAD = LoadOptions(
    NOWHERE,
    rate=10.0,
    duration=150.0,
    token_ids=True,
    vocab_size=32_000,
    prompt_len=(32, 64),
    output_len=(64, 504),
    ignore_eos=True,
)
POLICIES = [policy.value for policy in Policy]
COLOURS = dict(zip(POLICIES, ("#2b6cb0", "#dd6b20", "#805ad5", "#2f855a", "#c53030"), strict=False))
STREAMS, STREAM_TOKENS, LONG_PROMPT, LONG_AT_S = 32, 400, 4032, 4.0
"""Load of the picture about a long prompt: number of streams, tokens of each stream, tokens of the long prompt, and the
time of its arrival.
"""
STUDY_CLIENTS, STUDY_REQUESTS, SHOWN_S = 50, 1000, 20.0
"""Load of the picture about batching modes: clients, requests, and the length of the shown time."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A pause between two pieces of a stream: its end and its length, in seconds."""

    at: float
    seconds: float


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0] if arguments else "docs")
    folder.mkdir(parents=True, exist_ok=True)
    policies_picture(folder / "scheduling_policies.png", policy_runs())
    long_prompt_picture(folder / "scheduling_long_prompt.png", long_prompt_runs())
    batching_picture(folder / "scheduling_batching.png", batching_runs())
    return 0


def policy_runs(policies: Sequence[str] = tuple(POLICIES), load: LoadOptions = PUBLISHED_LOAD) -> list[SimulatedRun]:
    """Simulates ``load`` under each policy."""
    runs = []
    for policy in policies:
        setup = make_setup(CONFIG, [f"scheduler_config.policy={policy}"], DEVICE)
        arrivals = generated(load, setup.config)
        runs.append(simulate(policy, setup, OpenLoop(arrivals.requests, arrivals.times), load))
    print(f"{comparison_table(runs)}\n")
    return runs


def long_prompt_runs(policies: Sequence[str] = tuple(POLICIES)) -> list[SimulatedRun]:
    """Simulates a prompt that nearly fills the context and arrives while other requests decode.

    The cache is large enough for all requests, so no request is preempted.
    """
    load = replace(PUBLISHED_LOAD, duration=LONG_AT_S)
    generator = random.Random("long prompt")
    lengths = [*(STREAMS * [(PROMPT_LEN[0], STREAM_TOKENS)]), (LONG_PROMPT, 64)]
    requests = [
        SimulatedRequest(some_tokens(prompt, generator), output, ttft_objective=1.0, tbt_objective=0.1)
        for prompt, output in lengths
    ]
    times = [*(0.05 * index for index in range(STREAMS)), LONG_AT_S]
    runs = []
    for policy in policies:
        setup = make_setup(CONFIG, [f"scheduler_config.policy={policy}", "pa_config.num_blocks=4096"], DEVICE)
        runs.append(simulate(policy, setup, OpenLoop(requests, times), load))
    print(f"{comparison_table(runs)}\n")
    return runs


def batching_runs(modes: Sequence[str] = tuple(MODES), requests: int = STUDY_REQUESTS) -> list[SimulatedRun]:
    """Simulates the load of ``compare_batching.py`` in each batching mode."""
    asked = [
        SimulatedRequest(each.token_ids or (), each.max_tokens)
        for each in study_workload(requests, 0, PROMPT_LEN, OUTPUTS, VOCAB)
    ]
    runs = []
    for mode in modes:
        setup = make_setup(CONFIG, mode_settings(mode, BATCH_SIZE, BATCH_WAIT_S), DEVICE)
        runs.append(simulate(mode, setup, ClosedLoop(asked, STUDY_CLIENTS), PUBLISHED_LOAD))
    print(f"{comparison_table(runs)}\n")
    return runs


def policies_picture(path: Path, runs: Sequence[SimulatedRun]) -> None:
    """Draws TTFT, times between tokens, and the number of running requests, with one line per policy, to ``path``."""
    figure, (first, between, flight) = _figure(path, 3)
    for run in runs:
        colour = COLOURS[run.name]
        _distribution(first, [one.ttft_ms for one in run.figures.per_request if one.ttft_ms], run.name, colour)
        gaps = [1000.0 * gap.seconds for record in run.run.records for gap in gaps_of(record)]
        _distribution(between, gaps, run.name, colour)
        _requests_under_way(flight, run.run.records, run.name, colour)
    first.set_xlabel("time to first token (ms)")
    between.set_xlabel("time between tokens (ms)")
    first.set_ylabel("fraction of requests")
    between.set_ylabel("fraction of tokens")
    flight.set_xlabel("seconds since the start")
    flight.set_ylabel("running requests")
    between.legend(fontsize=7, frameon=False, loc="center right")
    _save(figure, path)


def long_prompt_picture(path: Path, runs: Sequence[SimulatedRun]) -> None:
    """Draws the streams' times between tokens around the arrival of the long prompt, with one panel per policy."""
    figure, panels = _figure(path, len(runs))
    for axes, run in zip(panels, runs, strict=True):
        *streams, long = run.run.records
        gaps = [gap for record in streams for gap in gaps_of(record)]
        axes.scatter([gap.at for gap in gaps], [1000 * gap.seconds for gap in gaps], s=5, color=COLOURS[run.name])
        axes.axvline(LONG_AT_S, color="black", linestyle=":", linewidth=0.8)
        first_token = long.piece_times[0]
        axes.axvline(first_token, color="black", linestyle="-", linewidth=0.8)
        longest = 1000 * max(gap.seconds for gap in gaps if gap.at > LONG_AT_S)
        axes.set_title(
            f"{run.name}\nlongest pause {longest:.0f} ms\nfirst token after {first_token - LONG_AT_S:.2f} s", fontsize=8
        )
        axes.set_xlim(LONG_AT_S - 0.5, LONG_AT_S + 1.5)
        axes.set_ylim(5, 500)
        axes.set_yscale("log")
        axes.set_xlabel("seconds")
    panels[0].set_ylabel("time between tokens of 32 streams (ms)")
    _save(figure, path)


def batching_picture(path: Path, runs: Sequence[SimulatedRun]) -> None:
    """Draws the number of requests that receive tokens during the first seconds, with one panel per mode."""
    figure, panels = _figure(path, len(runs))
    for axes, run in zip(panels, runs, strict=True):
        with_output = [record for record in run.run.records if record.piece_times]
        changes = [(record.piece_times[0], 1) for record in with_output]
        changes += [(record.end, -1) for record in with_output if record.end is not None]
        _steps(axes, changes, None, "#2f855a")
        axes.set_xlim(0, SHOWN_S)
        axes.set_ylim(0, STUDY_CLIENTS + 5)
        axes.set_title(f"{run.name}\n{run.figures.qps:.3g} requests/s", fontsize=8)
        axes.set_xlabel("seconds")
    panels[0].set_ylabel("requests that receive tokens")
    _save(figure, path)


def gaps_of(record: RequestRecord) -> list[Gap]:
    """Returns the pauses between the pieces of a request."""
    return [Gap(later, later - earlier) for earlier, later in pairwise(record.piece_times)]


def _figure(path: Path, panels: int) -> tuple[Figure, list[Axes]]:
    # Imported here, because tests use the loads of this module without matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, sharey=panels > 3)
    for each in axes:
        each.grid(alpha=0.3)
        each.tick_params(labelsize=7)
        each.xaxis.label.set_size(8)
        each.yaxis.label.set_size(8)
    return figure, list(axes)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=80)
    print(f"  {path}")


def _distribution(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    ordered = np.sort(np.array(values))
    if len(ordered) > 2000:
        ordered = np.quantile(ordered, np.linspace(0, 1, 2000))
    dashes = "--" if label == Policy.SLO.value else "-"  # the lines of slo and chunked nearly coincide
    axes.plot(ordered, np.linspace(0, 1, len(ordered)), dashes, color=colour, label=label, linewidth=1.2)
    axes.set_xscale("log")


def _requests_under_way(axes: Axes, records: Sequence[RequestRecord], label: str, colour: str) -> None:
    changes = [(record.sent, 1) for record in records]
    changes += [(record.end, -1) for record in records if record.end is not None]
    _steps(axes, changes, label, colour)


def _steps(axes: Axes, changes: list[tuple[float, int]], label: str | None, colour: str) -> None:
    changes.sort()
    times = [0.0, *(time for time, _ in changes)]
    counts = np.cumsum([0, *(change for _, change in changes)])
    axes.step(times, counts, where="post", color=colour, label=label, linewidth=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
