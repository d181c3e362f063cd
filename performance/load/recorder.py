"""The flight recorder's share of a server at work: its own time, beside that of the steps and of the process.

A server serves so many clients, each of which asks again when it has its answer. What its metrics have counted
meanwhile tells how long a step was from one to the next, how much of that the recorder took of the engine's thread, and
which part of the server process's processor time (engine and HTTP edge, not the agents) it was. The recorder's time is
what its own clock has measured around its work; the calls that only go through it are not in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from performance.load.closed_loop import run_closed_loop
from performance.load.metric_watch import fetch_metrics
from performance.load.options import LoadOptions
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import measure
from performance.load.workload import token_workload
from performance.program import LoadTestError, exits_with_errors, parse_counts, positive, write_json
from performance.terminal import format_number, format_table

__all__ = ["Share", "main"]

RECORDER, STEPS, CPU = (
    "llm_serving_flight_recorder_seconds_total",
    "llm_serving_steps_total",
    "process_cpu_seconds_total",
)
VOCAB = 1000
WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Share:
    """One number of clients. Times are microseconds."""

    clients: int
    steps: float
    us_per_step: float
    """From one step to the next, by the clock."""
    recorder_us_per_step: float
    share_of_step: float
    share_of_cpu: float | None
    """Of the server process's processor time; None where that is less than a tick of its clock."""

    @classmethod
    def of(cls, clients: int, seconds: float, before: Mapping[str, float], after: Mapping[str, float]) -> Share:
        """Raises LoadTestError when the server does not tell, or made no step."""
        try:
            recorder_s, steps, cpu_s = (after[name] - before[name] for name in (RECORDER, STEPS, CPU))
        except KeyError as error:
            raise LoadTestError(f"the server's metrics have no {error}") from None
        if steps <= 0:
            raise LoadTestError("the server made no step")
        per_step = (1e6 * seconds / steps, 1e6 * recorder_s / steps)
        return cls(clients, steps, *per_step, recorder_s / seconds, recorder_s / cpu_s if cpu_s > 0 else None)


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """0; 2 when the server did not start, or requests failed."""
    parsed = _parser().parse_args(arguments)
    shares = []
    with tempfile.TemporaryDirectory(prefix="bench_recorder_") as folder:
        print("starting the server", file=sys.stderr)
        server = configured_server(
            "recorder", parsed.config, parsed.settings, Path(folder), parsed.start_timeout, program
        )
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
    header = ["clients", "steps", "us a step", "recorder us", "of the step %", "of the server's CPU %"]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama_tiny_cpu.yaml", help="default %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="any setting")
    parser.add_argument("--clients", type=parse_counts, default=(1, 4, 16), metavar="N,N", help="default 1,4,16")
    parser.add_argument("--requests", type=int, default=40, help="of each client (default %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens (default %(default)s)")
    parser.add_argument("--output-len", type=int, default=200, help="tokens (default %(default)s)")
    parser.add_argument("--start-timeout", type=positive, default=600.0, help="seconds for a server to be ready")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser
