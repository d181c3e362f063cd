"""Measures how much processor time self-checks, API keys and the audit log take from a server.

The program runs pairs of servers. One server has the self-checks at their defaults, API keys with quotas, and an audit
log. The other server has none of these features. Both servers of a pair run during all its rounds. In each round, one
server after the other gets the same requests, while the other server waits. A round takes seconds, so a machine that
becomes slower during a minute slows down both servers alike. The order changes with every round, and the requests
change with every round and pair. The first rounds of a pair do not count, because a new server is slower.

Both servers run without speculative decoding. It adapts to the measured times of steps, so two servers would compute
different numbers of rows for the same tokens.

The clients send the requests in a closed loop, so both servers compute batches of the same size. At a fixed rate, the
size would depend on the speed of the machine, and a larger batch needs less processor time for a token.

The cost is the ratio of the two servers' CPU seconds per output token, including the agents. The mean of the pairs'
ratios is compared with the limit. The program also prints the ratio of the times per output token. No limit applies to
this ratio, because it changes by a quarter between runs of a small model.

The exit code is 0 if the cost is below the limit, and 1 if it is above or requests failed. It is 3 if the result is not
decided: the cost is closer to the limit than the standard error of the mean. More pairs or more requests make the
standard error smaller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_serving.access.keys import digest_of, new_secret
from performance.load.closed_loop import run_closed_loop
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.server_cost import CPU_METRIC
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import measure
from performance.program import (
    EXIT_FAILURES,
    EXIT_UNSTEADY,
    LoadTestError,
    exits_with_errors,
    new_parser,
    parse_count,
    parse_range,
    write_json,
)
from performance.terminal import format_number, format_table

MAX_RATIO = 1.01
"""Maximum ratio of the processor time with and without the checks."""
WARM_UP = 8
"""Number of requests before the measurement."""
WARM_UP_ROUNDS = 3
"""Rounds of each pair that do not count. On a virtual machine, a server was slower in them."""
MET, MISSED, NOT_DECIDED = "met", "missed", "not decided"
EXIT_CODES = {MET: 0, MISSED: EXIT_FAILURES, NOT_DECIDED: EXIT_UNSTEADY}
BOTH = ("speculative_config.method=off",)
OFF = ("serving_config.canary_interval_s=0", "serving_config.row_check_interval=0")
KEY_RIGHTS = "admin requests_in_flight=100000 requests_per_minute=1000000 tokens_per_minute=1000000000"
"""Rights of the client's key. ``/metrics``, which has the processor time, needs the right ``admin``."""


@dataclass(frozen=True)
class _Round:
    """The measurements of one server in one round."""

    cpu_s: float
    output_tokens: int
    tpot_ms: float
    ttft_ms: float


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Runs the measurement and returns the exit code.

    0: success. 1: the cost exceeds the limit, or requests failed. 2: a server did not start. 3: the cost is not
    decided.
    """
    parsed = _parser().parse_args(arguments)
    base = LoadOptions(
        Endpoint("127.0.0.1", 0), seed=parsed.seed, token_ids=True, prompt_len=parsed.prompt_len,
        output_len=parsed.output_len, ignore_eos=True, warmup=WARM_UP, timeout_s=parsed.timeout, plot=False,
    )  # fmt: skip
    pairs = [_pair(parsed, base, number, program) for number in range(parsed.pairs)]
    cpu, time = (_ratios(pairs, name) for name in ("cpu_s_per_token", "tpot_ms"))
    results = {
        "cpu": {"ratios": cpu, "mean": statistics.mean(cpu), "standard_error": standard_error(cpu)},
        "time_per_token": {"ratios": time, "mean": statistics.mean(time), "standard_error": standard_error(time)},
        "limit": MAX_RATIO,
        "verdict": verdict(cpu, MAX_RATIO),
        "pairs": pairs,
    }
    print(_text(results))
    write_json(parsed.json, results)
    return EXIT_CODES[results["verdict"]]


def verdict(ratios: Sequence[float], limit: float) -> str:
    """Compares the mean of ``ratios`` with ``limit``. Returns ``met``, ``missed`` or ``not decided``.

    The result is ``not decided`` for a single ratio. It is also ``not decided`` if the distance of the mean from the
    limit is smaller than the standard error of the mean.
    """
    error, distance = standard_error(ratios), statistics.mean(ratios) - limit
    if error is None or abs(distance) < error:
        return NOT_DECIDED
    return MET if distance <= 0 else MISSED


def standard_error(ratios: Sequence[float]) -> float | None:
    """Returns the standard error of the mean, or None for a single ratio."""
    return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def _ratios(pairs: Sequence[dict[str, float]], name: str) -> list[float]:
    return [pair[f"on_{name}"] / pair[f"off_{name}"] for pair in pairs]


def _pair(parsed: argparse.Namespace, base: LoadOptions, number: int, program: Path) -> dict[str, float]:
    """Measures two servers alternately: one with and one without self-checks, API keys and audit log.

    The server that starts first can be slower in all rounds of a pair, so the order changes with every pair.
    """
    rounds: dict[str, list[_Round]] = {name: [] for name in (("on", "off") if number % 2 == 0 else ("off", "on"))}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_server(parsed, name, base, program)) for name in rounds}
        for index in range(-WARM_UP_ROUNDS, parsed.rounds):
            place = number * (WARM_UP_ROUNDS + parsed.rounds) + WARM_UP_ROUNDS + index
            seed = base.seed + 2 * place  # the warm-up of a round uses the next seed
            for name in ("on", "off") if (number + index) % 2 == 0 else ("off", "on"):
                measured = _measure(parsed, name, replace(servers[name], seed=seed))
                if index >= 0:
                    rounds[name].append(measured)
    found = {}
    for name, results in rounds.items():
        found[f"{name}_cpu_s_per_token"] = sum(r.cpu_s for r in results) / sum(r.output_tokens for r in results)
        found[f"{name}_tpot_ms"] = statistics.mean(r.tpot_ms for r in results)
        found[f"{name}_ttft_ms"] = statistics.mean(r.ttft_ms for r in results)
        print(
            f"pair {number + 1}/{parsed.pairs}, {name}: {1000 * found[f'{name}_cpu_s_per_token']:.4f} CPU ms and "
            f"{found[f'{name}_tpot_ms']:.4f} ms per token",
            file=sys.stderr,
        )
    return found


@contextmanager
def _server(parsed: argparse.Namespace, name: str, base: LoadOptions, program: Path) -> Iterator[LoadOptions]:
    """Starts a server with the features (``on``) or without them. Yields the options for its clients."""
    with tempfile.TemporaryDirectory(prefix="reliability_cost_") as place:
        folder, secret = Path(place), new_secret()
        keys = folder / "keys.txt"
        keys.touch(mode=0o600)
        keys.write_text(f"client sha256:{digest_of(secret).hex()} {KEY_RIGHTS}\n")
        on = [f"serving_config.api_keys_file={keys}", f"serving_config.audit_log={folder}/audit.log"]
        settings = [*BOTH, *(on if name == "on" else OFF), *parsed.settings]
        with configured_server(name, parsed.config, settings, folder, parsed.start_timeout, program) as endpoint:
            yield replace(base, endpoint=endpoint, api_key=secret if name == "on" else None)


def _measure(parsed: argparse.Namespace, name: str, options: LoadOptions) -> _Round:
    run = run_closed_loop(options, options.requests(parsed.requests, options.seed), parsed.clients)
    if run.interrupted:
        raise KeyboardInterrupt
    figures = measure(run)
    if figures.failed:
        raise LoadTestError(f"requests failed: {figures.failures}")
    if not run.server_cost.cpu_s or not figures.output_tokens:
        raise LoadTestError(f"server {name!r} has no metric {CPU_METRIC}, or sent no tokens")
    tpot, ttft = (value.mean or float("inf") for value in (figures.tpot_ms, figures.ttft_ms))
    return _Round(run.server_cost.cpu_s, figures.output_tokens, tpot, ttft)


def _text(results: dict[str, Any]) -> str:
    rows = [
        [
            str(number),
            *(format_number(1000 * pair[f"{name}_cpu_s_per_token"]) for name in ("on", "off")),
            f"{cpu:.4f}",
            *(format_number(pair[f"{name}_tpot_ms"]) for name in ("on", "off")),
            f"{time:.4f}",
        ]
        for number, (pair, cpu, time) in enumerate(
            zip(results["pairs"], results["cpu"]["ratios"], results["time_per_token"]["ratios"], strict=True), 1
        )
    ]
    heads = ["pair", "on, CPU ms per token", "off", "ratio", "on, ms per token", "off", "ratio"]
    return (
        format_table(heads, rows)
        + f"\n\n  CPU seconds per token: {_mean(results['cpu'])}; limit {results['limit']}: {results['verdict']}"
        + f"\n  time per token, not judged: {_mean(results['time_per_token'])}"
    )


def _mean(figure: dict[str, Any]) -> str:
    error = figure["standard_error"]
    return f"ratio {figure['mean']:.4f} (" + ("one pair)" if error is None else f"standard error {error:.4f})")


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "llama_tiny_cpu.yaml", starts_servers=True)
    parser.add_argument("--pairs", type=parse_count, default=5, help="pairs of servers (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="maximum seconds per request")
    parser.add_argument("--rounds", type=parse_count, default=8, help="rounds of each pair that count (%(default)s)")
    parser.add_argument("--requests", type=parse_count, default=80, help="per server and round (default %(default)s)")
    parser.add_argument("--clients", type=parse_count, default=16, help="number of clients (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths (default %(default)s)")
    parser.add_argument("--prompt-len", type=parse_range, default=(32, 64), metavar="A:B", help="tokens")
    parser.add_argument("--output-len", type=parse_range, default=(64, 504), metavar="A:B", help="tokens")
    return parser
