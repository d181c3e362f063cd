"""Draws the arrivals, running requests, latencies and throughput of a load test over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from performance.load.client import LoadRun
from performance.load.report import load_text
from performance.load.statistics import LoadFigures, RequestFigures

Array = npt.NDArray[np.float64]
MAX_BINS = 150
"""Maximum number of points of a curve."""
BLUE, ORANGE, GREEN, RED = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030"


def write_plot(path: Path, run: LoadRun, figures: LoadFigures, title: str | None = None) -> None:
    """Writes a PNG with four charts: arrivals, running requests, time to first token, throughput.

    ``title`` replaces the line that describes the run.
    """
    figure = Figure(figsize=(11, 10), layout="constrained")
    FigureCanvasAgg(figure)
    arrivals, running, first_token, throughput = figure.subplots(4, 1, sharex=True)
    end = max(run.total_time_s, run.options.duration)
    width = max(1.0, float(np.ceil(end / MAX_BINS)))
    edges = np.arange(0.0, end + width, width)
    _draw_arrivals(arrivals, run, edges)
    _draw_running(running, run)
    _draw_first_token(first_token, run, figures)
    _draw_throughput(throughput, run, edges)
    for axes in (arrivals, running, first_token, throughput):
        axes.grid(alpha=0.3)
        axes.set_xlim(0.0, edges[-1])
    figure.align_ylabels()
    throughput.set_xlabel("seconds since the start")
    figure.suptitle(
        f"{title or load_text(run)}\n{figures.completed} of {figures.requests} requests, {figures.failed} failed, "
        f"{figures.output_tokens_per_s:.0f} output tokens/s",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _per_second(times: Iterable[float], edges: Array, weights: Sequence[float] | None = None) -> Array:
    counts, _ = np.histogram(list(times), bins=edges, weights=weights)
    per_second: Array = counts / np.diff(edges)
    return per_second


def _draw_arrivals(axes: Axes, run: LoadRun, edges: Array) -> None:
    due = _per_second((record.due - run.start for record in run.records), edges)
    done = _per_second((record.end - run.start for record in run.records if record.ok and record.end), edges)
    axes.bar(edges[:-1], due, width=np.diff(edges), align="edge", color=BLUE, alpha=0.35, label="due")
    axes.stairs(done, edges, color=GREEN, label="completed")
    axes.axhline(run.options.rate, color=BLUE, linestyle=":", linewidth=1, label="requested rate")
    axes.set_ylabel("requests per second")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, ncols=3, frameon=False)


def _draw_running(axes: Axes, run: LoadRun) -> None:
    changes = [(record.sent - run.start, 1) for record in run.records]
    changes += [(record.end - run.start, -1) for record in run.records if record.end is not None]
    changes.sort()
    times = [0.0, *(time for time, _ in changes)]
    in_flight = np.cumsum([0, *(change for _, change in changes)])
    axes.step(times, in_flight, where="post", color=ORANGE, linewidth=1)
    axes.fill_between(times, in_flight, step="post", color=ORANGE, alpha=0.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests in flight")


def _draw_first_token(axes: Axes, run: LoadRun, figures: LoadFigures) -> None:
    def points(wanted: Iterable[RequestFigures]) -> tuple[list[float], list[float]]:
        pairs = [(one.record.due - run.start, one.ttft_ms) for one in wanted if one.ttft_ms is not None]
        return [due for due, _ in pairs], [ttft for _, ttft in pairs]

    axes.scatter(*points(one for one in figures.per_request if one.is_good), s=9, color=BLUE, label="objectives met")
    axes.scatter(*points(one for one in figures.per_request if not one.is_good), s=9, color=ORANGE, label="beyond")
    failed = [record.due - run.start for record in run.records if record.failure is not None]
    axes.scatter(failed, [0.0] * len(failed), s=25, marker="x", color=RED, label="failed", clip_on=False, zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time to first token (ms)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, ncols=3, frameon=False)


def _draw_throughput(axes: Axes, run: LoadRun, edges: Array) -> None:
    """Draws tokens per second. The tokens of a request are divided equally among its pieces."""
    times: list[float] = []
    weights: list[float] = []
    for record in run.records:
        pieces = len(record.piece_times)
        times += [time - run.start for time in record.piece_times]
        weights += [record.output_tokens / pieces] * pieces if pieces else []
    axes.stairs(_per_second(times, edges, weights), edges, fill=True, color=GREEN, alpha=0.35)
    axes.set_ylabel("output tokens per second")
