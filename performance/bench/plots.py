"""Draws the rates of kernels in a roofline chart, and the rates of the engine next to the machine's ceilings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from llm_serving.model.number_formats import WEIGHT_FORMATS

_PALETTE = ("#718096", "#d69e2e", "#2b6cb0", "#c53030", "#2f855a", "#dd6b20", "#6b46c1", "#319795", "#d53f8c")
COLOURS = dict(zip(WEIGHT_FORMATS, itertools.cycle(_PALETTE), strict=False))
MARKERS = {"linear": "o", "attention decode": "^", "attention prefill": "s", "attention chunk": "D"}
ROOFS = (
    ("int8_gops", "int8", "#c53030"),
    ("bf16_gflops", "bfloat16", "#2b6cb0"),
    ("fp32_gflops", "float32", "#718096"),
)


def plot_kernels(path: Path, result: Mapping[str, Any]) -> None:
    """Draws a roofline chart: the rate of each kernel over its operations per byte read, with the machine's limits."""
    ceilings = result["ceilings"]
    rows = [row for row in result["rows"] if row["threads"] == ceilings["threads"] and row["kernel"] in MARKERS]
    figure, (axes,) = _figure(1, (10, 7))
    intensity = np.logspace(-0.5, 4, 200)
    for key, name, colour in ROOFS:
        roof = np.minimum(ceilings[key], ceilings["read_gb_s"] * intensity)
        axes.plot(intensity, roof, color=colour, linewidth=1, label=f"{name}: {ceilings[key]:.0f} GOP/s")
    paged = intensity[intensity < 4]  # decode attention has fewer than four operations per byte
    paged_label = f"block by block: {ceilings['paged_read_gb_s']:.1f} GB/s"
    axes.plot(paged, ceilings["paged_read_gb_s"] * paged, color="black", linestyle=":", linewidth=1, label=paged_label)
    for kernel, marker in MARKERS.items():
        for number_format, colour in COLOURS.items():
            chosen = [row for row in rows if (row["kernel"], row["format"]) == (kernel, number_format)]
            if chosen:
                axes.scatter(
                    [row["gop_s"] / row["gb_s"] for row in chosen],
                    [row["gop_s"] for row in chosen],
                    s=22,
                    marker=marker,
                    color=colour,
                    alpha=0.75,
                    label=f"{kernel} {number_format}",
                )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte read", ylabel="billions of operations per second")
    axes.set_title(
        f"{ceilings['isa']}, {ceilings['threads']} threads, {ceilings['read_gb_s']:.1f} GB/s read", fontsize=10
    )
    axes.legend(fontsize=7, ncols=2, loc="lower right")
    _save(figure, path)


def plot_engine(path: Path, result: Mapping[str, Any]) -> None:
    """Draws the decode rate by batch size, the prefill rate by prompt length, and the fractions of the ceiling."""
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    figure, (rate_axes, prefill_axes, share_axes) = _figure(3, (14, 4.5))
    decode = [row for row in rows if row["kind"] == "decode"]
    prefill = [row for row in rows if row["kind"] == "prefill"]
    _bars(rate_axes, decode, "decode_tokens_per_s", "decode, tokens per second")
    _bars(prefill_axes, prefill, "prefill_tokens_per_s", "prefill, tokens per second")
    _bars(share_axes, [*decode, *prefill], "share_of_ceiling", "fraction of the ceiling")
    share_axes.set_ylim(0, 1)
    figure.suptitle(
        f"{result['model']}: weights {result['numbers']['weight_format']}, KV {result['numbers']['kv_format']}, "
        f"{result['op_table']} operators, {result['ceilings']['threads']} threads",
        fontsize=10,
    )
    _save(figure, path)


def plot_comparison(path: Path, rates: Mapping[str, Mapping[str, float | None]]) -> None:
    """Draws the tokens per second of several engines (outer key), with one panel for each row (inner key)."""
    names = list(dict.fromkeys(name for each in rates.values() for name in each))
    figure, panels = _figure(len(names), (2.6 * len(names), 0.5 + 0.32 * len(rates) + 1.2))
    for panel, name in zip(panels, names, strict=True):
        values = [each.get(name) or 0.0 for each in rates.values()]
        colours = ["#c53030" if who.startswith("ours") else "#718096" for who in rates]
        bars = panel.barh(list(rates), values, color=colours, alpha=0.8)
        panel.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        panel.set_xlim(0, 1.25 * max(values, default=1.0) or 1.0)
        panel.invert_yaxis()
        panel.set_title(f"{name}, tokens/s", fontsize=9)
        panel.tick_params(labelsize=8, labelleft=panel is panels[0])
    _save(figure, path)


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, label: str) -> None:
    bars = axes.bar([row["name"] for row in rows], [row[key] for row in rows], color="#2b6cb0", alpha=0.7)
    axes.bar_label(bars, fmt="%.2f" if key.startswith("share") else "%.0f", fontsize=8)
    axes.set_ylabel(label)
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)


def _figure(columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
