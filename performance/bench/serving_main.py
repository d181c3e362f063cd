"""Loads any OpenAI-compatible server, open loop, and measures the processor time of server, agents and client.

This is the load test (performance/load) with other defaults: 10 requests/s, prompts of 32 to 64 token ids, outputs of
64 to 504 tokens. The program accepts all options of the load test.

    python performance/bench_serving.py -T 30 --json FILE                         this project's server
    python performance/bench_serving.py -T 30 --base-url URL --server-pid PID     any other server

The process of a server on this machine is found by its port. The processor time of a server on another machine is not
measured. For servers that accept only text, --text-prompts sends words instead of token ids.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_serving.telemetry.statistics import Summary
from performance.bench.cpu_share import CpuMeter, CpuShare, NoServerProcessError, find_server_pid
from performance.load.client import LoadRun, run_load
from performance.load.options import LoadOptions, build_parser, options_of
from performance.load.progress import progress_display
from performance.load.report import format_report, report_json
from performance.load.statistics import LoadFigures, measure
from performance.program import EXIT_FAILURES, EXIT_INTERRUPTED, UsageError, exits_with_errors, write_json

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
VOCAB_SIZE = 32_000
"""Number of different tokens in prompts."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 for success; 1 if requests failed; 2 if there is no server; 130 if interrupted."""
    parsed = serving_parser().parse_args(arguments)
    options = options_of(parsed)
    meter = _meter(options, parsed.server_pid)
    with progress_display() as display:
        if meter is not None:
            meter.start()
        run = run_load(options, display)
        share = None if meter is None else meter.stop()
    figures = measure(run)
    print(format_report(run, figures))
    print(f"\n{summary(figures, share)}")
    write_results(run, figures, share, parsed.png)
    if run.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if figures.failed else 0


def serving_parser() -> argparse.ArgumentParser:
    parser = build_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(
        rate=10.0,
        duration=30.0,
        token_ids=True,
        vocab_size=VOCAB_SIZE,
        prompt_len=(32, 64),
        output_len=(64, 504),
        ignore_eos=True,
        warmup=2,
    )
    own = parser.add_argument_group("this benchmark")
    own.add_argument("--server-pid", type=int, help="the server's process (default: the local process with this port)")
    own.add_argument("--text-prompts", dest="token_ids", action="store_false", help="words instead of token ids")
    own.add_argument("--png", type=Path, metavar="FILE", help="write the picture to this file")
    return parser


def _meter(options: LoadOptions, server_pid: int | None) -> CpuMeter | None:
    """Returns a meter of the server's processor time, or None if the server runs on another machine.

    Raises UsageError if the process of ``--server-pid`` does not exist.
    """
    try:
        if server_pid is not None:
            return CpuMeter(server_pid)
        if options.endpoint.host in LOCAL_HOSTS:
            return CpuMeter(find_server_pid(options.endpoint.port))
    except NoServerProcessError as error:
        if server_pid is not None:
            raise UsageError(f"--server-pid: {error}") from error
        print(f"note: processor time is not measured: {error}", file=sys.stderr)
    return None


def summary(figures: LoadFigures, share: CpuShare | None) -> str:
    """Returns a short summary: completed requests, tokens per second, TTFT, and processor time."""
    ttft = figures.ttft_ms
    lines = [
        f"  {figures.completed} of {figures.requests} requests done in {figures.total_time_s:.1f} s, "
        f"{figures.output_tokens_per_s:.0f} tokens/s, TTFT p50 {_ms(ttft, 'p50')}, p99 {_ms(ttft, 'p99')}"
    ]
    if share is not None:
        lines.append(f"  {share.text()}")
    return "\n".join(lines)


def _ms(summary_: Summary, name: str) -> str:
    value = getattr(summary_, name)
    return "-" if value is None else f"{value:.0f} ms"


def write_results(run: LoadRun, figures: LoadFigures, share: CpuShare | None, png: Path | None) -> None:
    """Writes the load test's JSON, with the processor time as ``cpu``, and the picture, if they are requested."""
    content: dict[str, Any] = report_json(run, figures) | {"cpu": None if share is None else share.as_dict()}
    write_json(run.options.json_path, content)
    if png is not None and figures.requests:
        from performance.load.plot import write_plot

        write_plot(png, run, figures)
