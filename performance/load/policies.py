"""Two scheduling policies under the same load: how much sooner do first tokens come?"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_serving.statistics import Summary
from llm_serving.text_table import format_number, format_table
from performance.load.client import run_load
from performance.load.endpoint import Endpoint, parse_endpoint
from performance.load.errors import LoadTestError
from performance.load.options import LoadOptions, add_workload_options, positive, workload_options
from performance.load.report import write_json
from performance.load.server_process import START_SERVER, running_server
from performance.load.statistics import LoadFigures, measure

POLICIES = ("fcfs", "prefill_first")
WARM_UP_REQUESTS = 8

DESCRIPTION = """\
Start one server per scheduling policy (fcfs and prefill_first), give both the same seeded load in turn, several times,
and print how many times longer the first token takes under fcfs."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load test under one policy."""

    policy: str
    seed: int
    figures: LoadFigures

    def summary(self, name: str) -> Summary:
        summary: Summary = getattr(self.figures, name)
        return summary

    def mean(self, name: str) -> float:
        """Mean of a latency; infinite when no request succeeded, so that no ratio flatters."""
        value = self.summary(name).mean
        return float("inf") if value is None else value


def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """0, or 1 when a request failed, or 2 when a server did not start."""
    parsed = _parser().parse_args(arguments)
    try:
        measurements = _measure_all(parsed, program)
    except LoadTestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    results = results_json(measurements, parsed)
    print(format_results(measurements, results))
    if parsed.json is not None:
        write_json(parsed.json, results)
    return 1 if any(measurement.figures.failed for measurement in measurements) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--config", default="llama_tiny_cpu.yaml", help="default %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="override for both servers"
    )
    parser.add_argument("-X", "--rate", type=positive, default=30.0, help="requests per second (default %(default)s)")
    parser.add_argument("-T", "--duration", type=positive, default=10.0, help="seconds of arrivals (default 10)")
    parser.add_argument("--repeats", type=int, default=5, help="load tests per policy (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat; the next has the next")
    parser.add_argument("--start-timeout", type=positive, default=600.0, help="seconds for a server to be ready")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    add_workload_options(parser)
    return parser


def _measure_all(parsed: argparse.Namespace, program: Path) -> list[Measurement]:
    """Both servers stand all the time, one idle; which goes first changes from repeat to repeat."""
    base = LoadOptions(
        endpoint=Endpoint("127.0.0.1", 0),
        rate=parsed.rate,
        duration=parsed.duration,
        warmup=WARM_UP_REQUESTS,
        plot=False,
        **workload_options(parsed),
    )
    measurements = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare_policies_")))
        endpoints = {}
        for policy in POLICIES:
            print(f"starting the server for {policy}", file=sys.stderr)
            server = running_server(
                policy,
                _server_arguments(parsed, policy, folder),
                folder / f"{policy}.stderr",
                parsed.start_timeout,
                program,
            )
            endpoints[policy] = parse_endpoint(stack.enter_context(server))
        for repeat in range(parsed.repeats):
            for policy in POLICIES if repeat % 2 == 0 else reversed(POLICIES):
                options = replace(base, endpoint=endpoints[policy], seed=parsed.seed + repeat)
                run = run_load(options)
                measurement = Measurement(policy, options.seed, measure(run))
                measurements.append(measurement)
                print(_progress_line(measurement, repeat, parsed.repeats), file=sys.stderr)
                if run.interrupted:
                    raise KeyboardInterrupt
    return measurements


def _server_arguments(parsed: argparse.Namespace, policy: str, folder: Path) -> list[str]:
    settings = [
        f"scheduler_config.policy={policy}",
        "serving_config.server_port=0",
        "serving_config.agent_ports=[0]",
        f"log_config.path={folder / policy}.log",
        *parsed.settings,
    ]
    return ["--config", parsed.config, *(part for setting in settings for part in ("--set", setting))]


def _progress_line(measurement: Measurement, repeat: int, repeats: int) -> str:
    figures = measurement.figures
    return (
        f"repeat {repeat + 1}/{repeats} {measurement.policy}: mean TTFT {format_number(figures.ttft_ms.mean)} ms, "
        f"{figures.failed} of {figures.requests} failed"
    )


def results_json(measurements: Sequence[Measurement], parsed: argparse.Namespace) -> dict[str, Any]:
    """``ratio_mean_ttft``: fcfs / prefill_first of each repeat, and the median; above 1, prefill_first is better."""
    runs = {policy: [one for one in measurements if one.policy == policy] for policy in POLICIES}
    return {
        "config": parsed.config,
        "settings": parsed.settings,
        "rate": parsed.rate,
        "duration_s": parsed.duration,
        "ratio_mean_ttft": _ratios(runs, "ttft_ms"),
        "ratio_mean_tpot": _ratios(runs, "tpot_ms"),
        "ratio_mean_e2e": _ratios(runs, "e2e_s"),
        "policies": {policy: [_run_json(one) for one in runs[policy]] for policy in POLICIES},
    }


def _ratios(runs: Mapping[str, Sequence[Measurement]], name: str) -> dict[str, Any]:
    """Pairs share a seed, that is, the load."""
    fcfs, prefill_first = (sorted(runs[policy], key=lambda one: one.seed) for policy in POLICIES)
    ratios = [slow.mean(name) / fast.mean(name) for slow, fast in zip(fcfs, prefill_first, strict=True)]
    return {"median": statistics.median(ratios), "per_repeat": ratios}


def _run_json(measurement: Measurement) -> dict[str, Any]:
    figures = measurement.figures
    return {
        "seed": measurement.seed,
        "requests": figures.requests,
        "failed": figures.failed,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "ttft_ms": figures.ttft_ms.as_dict(),
        "tpot_ms": figures.tpot_ms.as_dict(),
        "e2e_s": figures.e2e_s.as_dict(),
    }


def format_results(measurements: Sequence[Measurement], results: Mapping[str, Any]) -> str:
    header = ["median over repeats of", "mean TTFT (ms)", "p99 TTFT (ms)", "mean TPOT (ms)", "output tokens/s"]
    rows = []
    for policy in POLICIES:
        runs = [one for one in measurements if one.policy == policy]
        columns = (
            [one.mean("ttft_ms") for one in runs],
            [one.summary("ttft_ms").p99 or 0.0 for one in runs],
            [one.mean("tpot_ms") for one in runs],
            [one.figures.output_tokens_per_s for one in runs],
        )
        rows.append([policy, *(format_number(statistics.median(column)) for column in columns)])
    ratio = results["ratio_mean_ttft"]
    each = ", ".join(f"{value:.2f}" for value in ratio["per_repeat"])
    return f"{format_table(header, rows)}\n\n  mean TTFT fcfs / prefill_first: {ratio['median']:.2f} (median of {each})"
