"""Compares the values of a setting under the same load, with one server per value."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from performance.load.client import run_load
from performance.load.options import (
    LoadOptions,
    add_arrival_options,
    add_objective_options,
    add_workload_options,
    options_of,
)
from performance.load.report import COLUMNS, figures_json
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import LoadFigures, measure
from performance.load.watches import fetch_metrics
from performance.program import exits_with_errors, new_parser, parse_values, positive, write_json
from performance.terminal import format_number, format_table

__all__ = ["Measurement", "main"]

POLICIES = ("scheduler_config.policy", ("fcfs", "prefill_first"))

DESCRIPTION = """\
Starts a server for each value of a setting, one after the other, and gives all of them the same load. Prints the
figures of each value. They include the server's own: preempted requests, the fraction of prompt tokens found in the
prefix cache, and the seconds of steps with prompts. With --repeats, each value gets several servers; the order changes
with every repeat, and so does the seed. If decoding is greedy, all values must return the same texts. The exit code is
1 if they do not, or if requests failed.

  --vary scheduler_config.policy=prefill_first,fcfs,decode_first,chunked,slo
  --vary scheduler_config.prefix_cache=false,true --beginnings 1x1000"""

SHOWN = (
    "total s", "tokens/s", "TTFT mean ms", "TTFT p50 ms", "TTFT p99 ms", "TBT p50 ms", "TBT p99 ms", "TPOT mean ms",
    "goodput %",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements of one server, which ran with one value of the compared setting."""

    value: str
    seed: int
    figures: LoadFigures
    metrics: Mapping[str, float]
    """The server's metrics at the end of the load."""
    texts: tuple[str | None, ...]

    @property
    def preemptions(self) -> float:
        return self._sum("llm_serving_preemptions_total")

    @property
    def found(self) -> float:
        """Fraction of the prompt tokens that the prefix cache found, 0 to 1."""
        asked = self._sum("llm_serving_prefix_cache_query_tokens_total")
        return self._sum("llm_serving_prefix_cache_hit_tokens_total") / asked if asked else 0.0

    @property
    def prompt_steps_s(self) -> float:
        """Seconds that the server spent in steps with prompt tokens (prefill and mixed steps)."""
        kinds = ("prefill", "mixed")
        return sum(self.metrics.get(f'llm_serving_step_seconds_sum{{kind="{kind}"}}', 0.0) for kind in kinds)

    def _sum(self, name: str) -> float:
        """Returns the sum of a metric over all labels."""
        return sum(value for each, value in self.metrics.items() if each.partition("{")[0] == name)

    def columns(self) -> dict[str, float]:
        """Returns the numbers of a table row. A missing latency is infinite, so that its ratio never looks good."""
        values = {name: COLUMNS[name](self.figures) for name in SHOWN}
        return {
            **{name: float("inf") if value is None else value for name, value in values.items()},
            "preempted": self.preemptions,
            "prefix hit %": 100 * self.found,
            "prompt steps s": self.prompt_steps_s,
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            **figures_json(self.figures),
            "goodput": self.figures.goodput_fraction,
            "preemptions": self.preemptions,
            "prefix_cache_found": self.found,
            "prompt_steps_s": self.prompt_steps_s,
        }


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Runs the comparison and returns the exit code.

    0: success. 1: a request failed, or texts differ. 2: a server did not start, or an option is wrong.
    """
    parsed = _parser().parse_args(arguments)
    base = replace(options_of(parsed), keep_text=True, plot=False)
    measurements = _measure_all(parsed, base, program)
    results = results_json(measurements, parsed)
    print(format_results(measurements, results))
    write_json(parsed.json, results)
    has_failed = any(measurement.figures.failed for measurement in measurements)
    return 1 if has_failed or results["texts_identical"] is False else 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(DESCRIPTION, "llama_tiny_cpu.yaml", starts_servers=True)
    key, values = POLICIES
    parser.add_argument(
        "--vary", type=parse_values, default=POLICIES, metavar="KEY=V1,V2", help=f"default {key}={','.join(values)}"
    )
    parser.add_argument("--repeats", type=int, default=1, help="servers for each value (default %(default)s)")
    parser.add_argument("--timeout", type=positive, default=3600.0, help="maximum seconds per request")
    add_arrival_options(parser)
    add_workload_options(parser)
    add_objective_options(parser.add_argument_group("objectives"))
    parser.set_defaults(
        port=0, host="127.0.0.1", base_url=None, model=None, api="openai", api_key=None, warmup=0, output_dir=Path(),
        no_plot=True,
    )  # fmt: skip
    return parser


def _measure_all(parsed: argparse.Namespace, base: LoadOptions, program: Path) -> list[Measurement]:
    """Runs a server for each value of the setting, in each repeat. Every second repeat takes the values in reverse."""
    key, values = parsed.vary
    measurements = []
    with tempfile.TemporaryDirectory(prefix="compare_settings_") as folder:
        for repeat in range(parsed.repeats):
            for value in values if repeat % 2 == 0 else reversed(values):
                settings = [f"{key}={value}", *parsed.settings]
                place = Path(folder)
                with configured_server(
                    value, parsed.config, settings, place, parsed.start_timeout, program
                ) as endpoint:
                    measured = _measure(value, replace(base, endpoint=endpoint, seed=base.seed + repeat))
                measurements.append(measured)
                print(_progress_line(measured, repeat, parsed.repeats), file=sys.stderr)
    return measurements


def _measure(value: str, options: LoadOptions) -> Measurement:
    run = run_load(options)
    if run.interrupted:
        raise KeyboardInterrupt
    texts = tuple(record.text for record in run.records)
    return Measurement(value, options.seed, measure(run), fetch_metrics(options.endpoint), texts)


def _progress_line(measurement: Measurement, repeat: int, repeats: int) -> str:
    figures = measurement.figures
    return (
        f"repeat {repeat + 1}/{repeats} {measurement.value}: mean TTFT {format_number(figures.ttft_ms.mean)} ms, "
        f"{figures.failed} of {figures.requests} failed"
    )


def results_json(measurements: Sequence[Measurement], parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the comparison as JSON.

    A ratio is the result with the first value of the setting divided by the result with another value.
    ``texts_identical`` is None if decoding is not greedy.
    """
    key, values = parsed.vary
    runs = {value: [one for one in measurements if one.value == value] for value in values}
    for each in runs.values():
        each.sort(key=lambda one: one.seed)
    greedy = parsed.temperature == 0.0
    return {
        "config": parsed.config,
        "settings": parsed.settings,
        "vary": key,
        "rate": parsed.rate,
        "duration_s": parsed.duration,
        "ratio_mean_ttft": _ratios(runs, "TTFT mean ms"),
        "ratio_mean_tpot": _ratios(runs, "TPOT mean ms"),
        "ratio_total_time": _ratios(runs, "total s"),
        "ratio_prompt_steps": _ratios(runs, "prompt steps s"),
        "texts_identical": _texts_identical(runs) if greedy else None,
        "values": {value: [one.as_json() for one in runs[value]] for value in values},
    }


def _ratios(runs: Mapping[str, Sequence[Measurement]], column: str) -> dict[str, dict[str, Any]]:
    first, *others = runs
    found = {}
    for other in others:
        pairs = zip(runs[first], runs[other], strict=True)
        ratios = [_ratio(one.columns()[column], another.columns()[column]) for one, another in pairs]
        found[f"{first}/{other}"] = {"median": statistics.median(ratios), "per_repeat": ratios}
    return found


def _ratio(amount: float, other: float) -> float:
    return amount / other if other else float("inf")


def _texts_identical(runs: Mapping[str, Sequence[Measurement]]) -> bool:
    first, *others = runs.values()
    return all(one.texts == another.texts for other in others for one, another in zip(first, other, strict=True))


def format_results(measurements: Sequence[Measurement], results: Mapping[str, Any]) -> str:
    repeats = len(next(iter(results["values"].values())))
    rows = []
    for value in results["values"]:
        columns = zip(*(one.columns().values() for one in measurements if one.value == value), strict=True)
        rows.append([value, *(format_number(statistics.median(column)) for column in columns)])
    header = [results["vary"] + (", medians" if repeats > 1 else ""), *measurements[0].columns()]
    lines = [format_table(header, rows), ""]
    for name, ratio in results["ratio_mean_ttft"].items():
        each = ", ".join(f"{value:.2f}" for value in ratio["per_repeat"])
        lines.append(f"  mean TTFT {name}: {ratio['median']:.2f}" + (f" (median of {each})" if repeats > 1 else ""))
    if results["texts_identical"] is not None:
        same = "the same under every value" if results["texts_identical"] else "NOT the same under every value"
        lines.append(f"  texts: {same}")
    return "\n".join(lines)
