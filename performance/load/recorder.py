"""Measures the cost of the flight recorder in a busy server.

A number of clients send requests in a closed loop. From the server's metrics the program calculates the time from one
step to the next, and how much of this time the recorder takes. It also calculates which fraction of the server
process's processor time the recorder takes. Agents are separate processes, so their time does not count. The recorder
measures its own time, without the time of the scheduler calls that it records.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from performance.load.closed_loop import run_closed_loop
from performance.load.options import LoadOptions
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import measure
from performance.load.watches import fetch_metrics
from performance.load.workload import token_workload
from performance.program import LoadTestError, exits_with_errors, new_parser, parse_counts, write_json
from performance.terminal import format_number, format_table

__all__ = ["Share", "main"]

RECORDER, STEPS, CPU = (
    "llm_serving_flight_recorder_seconds_total",
    "llm_serving_steps_total",
    "process_cpu_seconds_total",
)
VOCAB = 1000
"""Number of different tokens in prompts."""
WARM_UP = 4
"""Number of first requests that are not measured."""


@dataclass(frozen=True, slots=True)
class Share:
    """The cost of the flight recorder in a run with ``clients`` clients. Times are microseconds."""

    clients: int
    steps: float
    us_per_step: float
    """Elapsed time from one step to the next."""
    recorder_us_per_step: float
    share_of_step: float
    share_of_cpu: float | None
    """Fraction of the server process's processor time, or None if that time is too short to measure."""

    @classmethod
    def of(cls, clients: int, seconds: float, before: Mapping[str, float], after: Mapping[str, float]) -> Share:
        """Returns the recorder's cost in a run of ``seconds``, from the server's metrics before and after the run.

        Raises LoadTestError if a metric is missing or the server ran no step.
        """
        try:
            recorder_s, steps, cpu_s = (after[name] - before[name] for name in (RECORDER, STEPS, CPU))
        except KeyError as error:
            raise LoadTestError(f"the server's metrics have no {error}") from None
        if steps <= 0:
            raise LoadTestError("the server ran no step")
        per_step = (1e6 * seconds / steps, 1e6 * recorder_s / steps)
        return cls(clients, steps, *per_step, recorder_s / seconds, recorder_s / cpu_s if cpu_s > 0 else None)


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Runs the measurement. Returns 0, or 2 if the server did not start or requests failed."""
    parsed = _parser().parse_args(arguments)
    shares = []
    with tempfile.TemporaryDirectory(prefix="bench_recorder_") as folder:
        print("starting the server", file=sys.stderr)
        # Without drafts, each step computes one token of each sequence, so that steps are comparable.
        settings = ["speculative_config.method=off", *parsed.settings]
        server = configured_server("recorder", parsed.config, settings, Path(folder), parsed.start_timeout, program)
        with server as endpoint:
            options = LoadOptions(endpoint, token_ids=True, vocab_size=VOCAB, ignore_eos=True)
            run_closed_loop(options, token_workload(WARM_UP, 0, (8, 8), (8, 8), VOCAB), 1, None)
            shares = [_measure(options, clients, parsed) for clients in parsed.clients]
    print(_table(shares))
    write_json(parsed.json, {"config": parsed.config, "rows": [asdict(share) for share in shares]})
    return 0


def _measure(options: LoadOptions, clients: int, parsed: argparse.Namespace) -> Share:
    length = (parsed.output_len, parsed.output_len)
    requests = token_workload(clients * parsed.requests, clients, (parsed.prompt_len,) * 2, length, VOCAB)
    before = fetch_metrics(options.endpoint)
    run = run_closed_loop(options, requests, clients, None)
    after = fetch_metrics(options.endpoint)
    if run.interrupted:
        raise KeyboardInterrupt
    if failures := measure(run).failures:
        raise LoadTestError(f"requests failed: {failures}")
    return Share.of(clients, run.total_time_s, before, after)


def _table(shares: Sequence[Share]) -> str:
    header = ["clients", "steps", "us/step", "recorder us", "% of the step", "% of the server's CPU"]
    rows = [
        [
            str(share.clients),
            f"{share.steps:.0f}",
            f"{share.us_per_step:.0f}",
            f"{share.recorder_us_per_step:.1f}",
            format_number(100 * share.share_of_step),
            "-" if share.share_of_cpu is None else format_number(100 * share.share_of_cpu),
        ]
        for share in shares
    ]
    return format_table(header, rows)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "llama_tiny_cpu.yaml", starts_servers=True)
    parser.add_argument("--clients", type=parse_counts, default=(1, 4, 16), metavar="N,N", help="default 1,4,16")
    parser.add_argument("--requests", type=int, default=40, help="per client (default %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens (default %(default)s)")
    parser.add_argument("--output-len", type=int, default=200, help="tokens (default %(default)s)")
    return parser
