"""Measures a server that receives many times the load it can serve.

First, the program finds the server's peak: it measures the goodput (requests per second that meet their objectives) at
several rates. Then it sends ``--factor`` times the peak's rate for ``--duration`` seconds. It reports the goodput, how
fast the server rejects requests (429), and the memory of all of the server's processes over time. The time of a
rejection counts from the write of the request to the arrival of the response in the kernel. The report also has the
client's own delay, and the fraction of the cores' time that a hypervisor took.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from llm_serving.telemetry.statistics import percentile
from performance.load.client import run_load
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import LoadFigures, measure
from performance.load.watches import children_mib, sampled
from performance.program import LoadTestError, exits_with_errors, new_parser, parse_range, positive, write_json
from performance.terminal import format_number, format_table

__all__ = ["main"]

REFUSED = "http 429"
REFUSAL_PERCENTS = (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100))
MEMORY_INTERVAL_S = 1.0
SETTLE_S = 1.0
"""Pause before a load in seconds, so that the previous load has ended completely."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Returns 0, or 2 if the server did not start or if requests failed for other reasons than rejection."""
    parsed = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench_overload_") as folder:
        settings = [
            "scheduler_config.policy=slo",
            f"scheduler_config.ttft_objective_ms={parsed.slo_ttft_ms:g}",
            f"scheduler_config.tbt_objective_ms={parsed.slo_tpot_ms:g}",
            f"scheduler_config.max_waiting_requests={parsed.max_waiting}",
            *parsed.settings,
        ]
        print("starting the server", file=sys.stderr)
        server = configured_server("overload", parsed.config, settings, Path(folder), parsed.start_timeout, program)
        with server as endpoint:
            results = _study(parsed, endpoint)
    print(_text(results))
    write_json(parsed.json, results)
    return 0


def _study(parsed: argparse.Namespace, endpoint: Endpoint) -> dict[str, Any]:
    base = LoadOptions(
        endpoint, seed=parsed.seed, token_ids=True, prompt_len=parsed.prompt_len, output_len=parsed.output_len,
        ignore_eos=True, return_token_ids=True, warmup=4, timeout_s=3600.0,
        slo_ttft_ms=parsed.slo_ttft_ms, slo_tpot_ms=parsed.slo_tpot_ms,
    )  # fmt: skip
    rows = []
    for rate in parsed.rates:
        figures = _load(replace(base, rate=rate, duration=parsed.peak_duration))
        rows.append({"rate": rate, "goodput_per_s": figures.goodput_per_s, **_counts(figures)})
        print(f"  {rate:g} requests/s: goodput {figures.goodput_per_s:.2f}/s", file=sys.stderr)
    peak = max(rows, key=lambda row: float(row["goodput_per_s"]))
    before = psutil.cpu_times()
    with sampled(MEMORY_INTERVAL_S, children_mib) as memory:
        overload = replace(base, rate=parsed.factor * peak["rate"], duration=parsed.duration, seed=parsed.seed + 1)
        figures = _load(overload)
    stolen = _stolen_share(before, psutil.cpu_times())
    refusals = sorted(_refusal_ms(figures))
    third = max(1, len(memory) // 3)
    return {
        "rates": rows,
        "peak_rate": peak["rate"],
        "peak_goodput_per_s": peak["goodput_per_s"],
        "overload_rate": overload.rate,
        "overload_duration_s": overload.duration,
        "overload_goodput_per_s": figures.goodput_per_s,
        "goodput_share_of_peak": figures.goodput_per_s / peak["goodput_per_s"] if peak["goodput_per_s"] else 0.0,
        **_counts(figures),
        "refusal_ms": {name: percentile(refusals, q) for name, q in REFUSAL_PERCENTS} if refusals else None,
        "client_lateness_ms": {"p99": figures.lateness_ms.p99, "max": figures.lateness_ms.max},
        "stolen_share": stolen,
        "memory_mib": {
            "start": memory[0],
            "first_third": max(memory[:third]),
            "last_third": max(memory[-third:]),
        },
    }


def _load(options: LoadOptions) -> LoadFigures:
    time.sleep(SETTLE_S)
    run = run_load(options)
    if run.interrupted:
        raise KeyboardInterrupt
    figures = measure(run)
    others = {name: count for name, count in figures.failures.items() if name != REFUSED}
    if others:
        raise LoadTestError(f"requests failed for other reasons than rejection: {others}")
    return figures


def _counts(figures: LoadFigures) -> dict[str, int]:
    return {"requests": figures.requests, "refused": figures.failures.get(REFUSED, 0), "good": figures.good_requests}


def _refusal_ms(figures: LoadFigures) -> list[float]:
    records = [one.record for one in figures.per_request]
    return [(record.end - record.sent) * 1e3 for record in records if record.failure == REFUSED and record.end]


def _stolen_share(before: Any, after: Any) -> float:
    """Returns the fraction of all cores' time that a hypervisor took between two ``psutil.cpu_times``."""
    spent = [later - earlier for earlier, later in zip(before, after, strict=True)]
    return float(after.steal - before.steal) / sum(spent) if sum(spent) > 0 else 0.0


def _text(results: dict[str, Any]) -> str:
    rows = [[f"{row['rate']:g}", format_number(row["goodput_per_s"]), str(row["requests"]), str(row["refused"])]
            for row in results["rates"]]  # fmt: skip
    rate, seconds = results["overload_rate"], results["overload_duration_s"]
    goodput = format_number(results["overload_goodput_per_s"])
    rows.append([f"{rate:g}", goodput, str(results["requests"]), str(results["refused"])])
    memory, refusal = results["memory_mib"], results["refusal_ms"]
    lines = [
        format_table(["requests/s", "goodput/s", "requests", "refused"], rows),
        "",
        f"  {rate:g} requests/s for {seconds:g} s: {results['goodput_share_of_peak']:.1%} of the peak's goodput",
        f"  memory {memory['start']:.0f} MiB at the start, maximum {memory['first_third']:.0f} in the first third and"
        f" {memory['last_third']:.0f} in the last",
    ]
    if refusal is not None:
        times = ", ".join(f"{refusal[name]:.1f} ({name})" for name, _ in REFUSAL_PERCENTS)
        lines.append(f"  rejected within ms: {times}")
    late = results["client_lateness_ms"]
    lines.append(
        f"  delay of the client {late['p99']:.1f} (p99) to {late['max']:.1f} (max) ms;"
        f" a hypervisor took {results['stolen_share']:.1%} of the cores' time"
    )
    return "\n".join(lines)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(positive(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "llama_160m_cpu.yaml", starts_servers=True)
    parser.add_argument("--rates", type=_rates, default=(8.0, 12.0, 16.0, 20.0), metavar="R,R", help="to find the peak")
    parser.add_argument("--peak-duration", type=positive, default=30.0, help="seconds at each rate")
    parser.add_argument("--factor", type=positive, default=10.0, help="times the peak's rate (default %(default)s)")
    parser.add_argument("--duration", type=positive, default=300.0, help="seconds of overload (default %(default)s)")
    parser.add_argument("--prompt-len", type=parse_range, default=(32, 64), metavar="A:B")
    parser.add_argument("--output-len", type=parse_range, default=(64, 192), metavar="A:B")
    parser.add_argument("--max-waiting", type=int, default=64, help="maximum of waiting requests (default %(default)s)")
    parser.add_argument("--slo-ttft-ms", type=positive, default=1000.0, help="objective (default %(default)s)")
    parser.add_argument("--slo-tpot-ms", type=positive, default=100.0, help="objective (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser
