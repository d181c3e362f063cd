"""Compares the processor time and the energy of the quiet mode (``power.mode: quiet``) with those of the normal mode.

Each round starts a server with one mode, stops it, and does the same with the other mode. The order changes with every
round. A server first gets no requests for --idle-seconds. Then it gets a light load, the same for both servers of a
round. Before the first round, both servers start once, so that all measured servers start from stored programs. The
program prints medians with the least and the largest value:

- the processor time without requests, in percent of a core
- the processor seconds and, if RAPL can be read, the joules of the machine, for 1000 output tokens of the light load
- the latencies of the light load

A ratio compares the two servers of a round. The exit code is 1 if the quiet server needs more than 0.1 % of a core
without requests (median of the rounds). It is 2 if a server did not start or did not come to rest, or if a request
failed.

example:
  bench_quiet.py --rounds 3 --idle-seconds 60 -X 1 -T 60
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from performance.bench.cpu_share import CpuMeter, NoServerProcessError, find_server_pid
from performance.load.client import run_load
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions, add_arrival_options
from performance.load.server_cost import CPU_METRIC
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import measure
from performance.program import (
    EXIT_FAILURES,
    LoadTestError,
    exits_with_errors,
    new_parser,
    parse_count,
    parse_range,
    positive,
    write_json,
)
from performance.terminal import format_number, format_table

MODES = ("normal", "quiet")
MAX_IDLE_PERCENT = 0.1
"""Maximum processor time of a quiet server without requests, in percent of a core."""
WARM_UP = 4
"""Number of requests before the light load."""
REST_INTERVAL_S = 1.0
"""Seconds of a check whether a started server is at rest."""
REST_LIMIT_S = 60.0
"""Maximum seconds until a started server is at rest. Agents still allocate their KV cache after they are ready."""
REST_PERCENT = 1.0
"""A started server is at rest if it uses less than this, in percent of a core."""

Figures = dict[str, float | None]
"""The measurements of one server, by the names in ``ROWS``. None: not measured."""
ROWS = {
    "idle_server_percent": "without requests: server, % of a core",
    "idle_agents_percent": "without requests: agents, % of a core",
    "idle_percent": "without requests: both, % of a core",
    "cpu_s_per_1000_tokens": "light load: CPU seconds for 1000 tokens",
    "joules_per_1000_tokens": "light load: joules for 1000 tokens",
    "ttft_ms": "light load: time to first token, mean, ms",
    "tpot_ms": "light load: time per output token, mean, ms",
}
"""Names of the measurements in the JSON, and in the table."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Runs the comparison. Returns 0, 1 if the quiet server needs too much time, 2 if a server or a request failed."""
    parsed = _parser().parse_args(arguments)
    for mode in MODES:
        with _server(mode, parsed, program):
            pass
    rounds: list[dict[str, Figures]] = []
    for number in range(parsed.rounds):
        order = MODES if number % 2 == 0 else MODES[::-1]
        rounds.append({mode: _measure_server(mode, number, parsed, program) for mode in order})
    print(table(rounds))
    idle = statistics.median(values_of(rounds, "quiet", "idle_percent"))
    is_met = idle <= MAX_IDLE_PERCENT
    print(
        f"\n  quiet server without requests: {idle:.3f} % of a core; limit {MAX_IDLE_PERCENT:g} %: "
        f"{'met' if is_met else 'missed'}"
    )
    write_json(parsed.json, {"rounds": rounds, "limit_idle_percent": MAX_IDLE_PERCENT, "idle_limit_is_met": is_met})
    return 0 if is_met else EXIT_FAILURES


def table(rounds: Sequence[dict[str, Figures]]) -> str:
    """Returns the medians of both modes and of their ratio, each with the least and the largest value."""
    rows = []
    for name, title in ROWS.items():
        normal, quiet = (values_of(rounds, mode, name) for mode in MODES)
        ratios = [one / other for other, one in zip(normal, quiet, strict=False) if other]
        rows.append([title, *map(_spread, (normal, quiet, ratios))])
    return format_table(["median (least to most)", *MODES, "quiet / normal"], rows)


def values_of(rounds: Sequence[dict[str, Figures]], mode: str, name: str) -> list[float]:
    """Returns a measurement of one mode in all rounds. Empty if a round does not have it, as without RAPL."""
    values = [each[mode][name] for each in rounds]
    return [value for value in values if value is not None] if None not in values else []


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    median, least, most = (format_number(of(values)) for of in (statistics.median, min, max))
    return f"{median} ({least} to {most})"


def _measure_server(mode: str, number: int, parsed: argparse.Namespace, program: Path) -> Figures:
    """Starts a server, measures it without requests and under the light load, and stops it."""
    print(f"round {number + 1}/{parsed.rounds}: {mode}", file=sys.stderr, flush=True)
    with _server(mode, parsed, program) as endpoint:
        try:
            meter = CpuMeter(find_server_pid(endpoint.port))
        except NoServerProcessError as error:
            raise LoadTestError(str(error)) from error
        _wait_until_at_rest(meter)
        server, agents = _idle_percent(meter, parsed.idle_seconds)
        idle = {"idle_server_percent": server, "idle_agents_percent": agents, "idle_percent": server + agents}
        return idle | _load(_load_options(endpoint, number, parsed))


@contextmanager
def _server(mode: str, parsed: argparse.Namespace, program: Path) -> Iterator[Endpoint]:
    settings = [f"power.mode={mode}", *parsed.settings]
    with (
        tempfile.TemporaryDirectory(prefix="bench_quiet_") as folder,
        configured_server(mode, parsed.config, settings, Path(folder), parsed.start_timeout, program) as endpoint,
    ):
        yield endpoint


def _wait_until_at_rest(meter: CpuMeter) -> None:
    """Raises LoadTestError if the server does not come to rest in time. Its figures would include its start."""
    deadline = time.monotonic() + REST_LIMIT_S
    while (percent := sum(_idle_percent(meter, REST_INTERVAL_S))) >= REST_PERCENT:
        if time.monotonic() >= deadline:
            raise LoadTestError(
                f"the server still uses {percent:.1f} % of a core {REST_LIMIT_S:g} s after its start, without "
                f"requests; at rest, it uses less than {REST_PERCENT:g} %"
            )


def _idle_percent(meter: CpuMeter, seconds: float) -> tuple[float, float]:
    """Waits for ``seconds``. Returns the processor time of the server and of its agents, in percent of a core."""
    meter.start()
    time.sleep(seconds)
    share = meter.stop()
    agents, client = share.cpu_s.get("agent", 0.0), share.cpu_s["client"]
    server = sum(share.cpu_s.values()) - agents - client
    return 100 * server / share.wall_s, 100 * agents / share.wall_s


def _load_options(endpoint: Endpoint, number: int, parsed: argparse.Namespace) -> LoadOptions:
    """Returns the load of a round. The warm-up uses the next seed, so a round has two seeds."""
    return LoadOptions(
        endpoint, rate=parsed.rate, duration=parsed.duration, arrivals=parsed.arrivals, seed=parsed.seed + 2 * number,
        token_ids=True, prompt_len=parsed.prompt_len, output_len=parsed.output_len, ignore_eos=True, warmup=WARM_UP,
        plot=False,
    )  # fmt: skip


def _load(options: LoadOptions) -> Figures:
    """Sends the light load. Raises LoadTestError if a request fails or the server does not measure its time."""
    run = run_load(options)
    if run.interrupted:
        raise KeyboardInterrupt
    figures = measure(run)
    if figures.failed:
        raise LoadTestError(f"requests failed: {figures.failures}")
    cost = run.server_cost.as_dict(figures.output_tokens)
    if cost["cpu_s_per_1000_tokens"] is None:
        raise LoadTestError(f"the server has no metric {CPU_METRIC}, or sent no tokens")
    of_tokens = {name: cost[name] for name in ("cpu_s_per_1000_tokens", "joules_per_1000_tokens")}
    return of_tokens | {"ttft_ms": figures.ttft_ms.mean, "tpot_ms": figures.tpot_ms.mean}


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "smollm2_135m_cpu.yaml", starts_servers=True)
    add = parser.add_argument
    add("--rounds", type=parse_count, default=3, help="servers of each mode (default %(default)s)")
    add("--idle-seconds", type=positive, default=60.0, help="seconds without requests (default %(default)s)")
    add("--prompt-len", type=parse_range, default=(32, 64), metavar="A:B", help="tokens (default 32:64)")
    add("--output-len", type=parse_range, default=(16, 64), metavar="A:B", help="tokens (default 16:64)")
    add_arrival_options(parser)
    parser.set_defaults(rate=1.0, duration=60.0)
    return parser
