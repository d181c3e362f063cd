"""Measures the cost of KV tiers without hits: the time of a load with tiers, divided by the time without tiers.

Starts two servers with the same config. Only one has KV tiers. In each round, both serve the same requests, one server
after the other. The order changes with every round. A server without requests sleeps, so it takes no processor time
from the other one. All prompts are random and used once, so no cached prefix and no tier helps. Both servers must
generate the same tokens.

Prints the mean of the rounds' ratios and its standard error. The exit code is 1 if the ratio exceeds --limit by more
than two standard errors. If the ratio is less than two standard errors away from the limit, more rounds are needed.

The program also prints the ratio of the processor times of server and agents. This ratio has no limit. It varies less,
but it leaves out the time in which no core worked.

    python performance/bench_kv_tier_cost.py
    python performance/bench_kv_tier_cost.py --ssd --rounds 20 --json cost.json
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from performance.bench.completion import complete
from performance.load.endpoint import Endpoint
from performance.load.server_cost import CPU_METRIC
from performance.load.server_process import configured_server
from performance.load.watches import fetch_metrics
from performance.program import (
    LoadTestError,
    client_threads,
    exits_with_errors,
    new_parser,
    parse_count,
    positive,
    write_json,
)
from performance.terminal import format_table

LIMIT = 1.01
"""Default of ``--limit``: maximum ratio of the time with tiers to the time without."""
WARM_UP_ROUNDS = 3
"""Rounds that do not count. On a virtual machine, a server was slower in them."""
FIRST_TOKEN = 10
"""Smallest token id in prompts."""
WITH, WITHOUT = "with tiers", "without tiers"


class TierCostError(LoadTestError):
    """Raised if a response is wrong, if a block comes from a tier, or if the tiers get no block."""


@dataclass(slots=True)
class Times:
    """Seconds and processor seconds of each round, by server."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {WITHOUT: [], WITH: []})
    processor: dict[str, list[float]] = field(default_factory=lambda: {WITHOUT: [], WITH: []})


def _ratios(times: dict[str, list[float]]) -> list[float]:
    return [one / other for one, other in zip(times[WITH], times[WITHOUT], strict=True)]


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the ratio. Returns 0, or 1 if the cost exceeds the limit, or 2 if a server or a response is wrong."""
    options = _parse(arguments)
    times = Times()
    with TemporaryDirectory(prefix="kv-tier-cost-", dir=options.folder) as folder, ExitStack() as owned:
        servers = {name: owned.enter_context(_server(name, options, Path(folder))) for name in times.seconds}
        for number in range(WARM_UP_ROUNDS + options.rounds):
            _run_round(number, servers, options, times)
        hits, stored = _blocks(servers[WITH], "hit"), _blocks(servers[WITH], "stored")
    if hits or not stored:
        raise TierCostError(f"the tiers took {stored:g} blocks and returned {hits:g}; expected are some and none")
    return _report(options, times, stored)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="smollm2_135m_cpu.yaml", help="config (default smollm2_135m_cpu.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting")
    parser.add_argument("--rounds", type=parse_count, default=12, help="rounds that count, at least 2 (default 12)")
    parser.add_argument("--requests", type=parse_count, default=16, help="requests of a round (default 16)")
    parser.add_argument("--concurrency", type=parse_count, default=4, help="requests at a time (default 4)")
    parser.add_argument("--prompt-tokens", type=parse_count, default=256, help="length of each prompt (default 256)")
    parser.add_argument("--output-tokens", type=parse_count, default=64, help="tokens of each output (default 64)")
    parser.add_argument("--host-blocks", type=parse_count, default=2000, help="host blocks of the tiers (default 2000)")
    parser.add_argument("--ssd", action="store_true", help="also write the blocks to an SSD")
    parser.add_argument("--folder", type=Path, help="folder on the SSD (default: for temporary files)")
    parser.add_argument("--limit", type=positive, default=LIMIT, help=f"largest ratio (default {LIMIT})")
    parser.add_argument("--start-timeout", type=positive, default=300.0, help="seconds for a start (default 300)")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}; a standard error needs at least 2")
    return options


def _server(name: str, options: argparse.Namespace, folder: Path) -> Any:
    place = folder / name.replace(" ", "-")
    place.mkdir()
    settings = ["serving_config.canary_interval_s=0", "speculative_config.method=off", *options.set]
    if name == WITH:
        settings.append(f"kv_tier_config.host_blocks={options.host_blocks}")
        settings += [f"kv_tier_config.ssd_folder={place / 'tier'}"] if options.ssd else []
    return configured_server(name, options.config, settings, place, options.start_timeout)


def _run_round(number: int, servers: dict[str, Endpoint], options: argparse.Namespace, times: Times) -> None:
    """Sends the requests of one round to both servers. The first rounds are a warm-up and do not count.

    Raises TierCostError if the servers generate different tokens.
    """
    prompts = _prompts(number, options)
    outputs = {}
    for name in list(servers) if number % 2 else list(reversed(servers)):
        before, begin = _processor_s(servers[name]), time.perf_counter()
        with client_threads(options.concurrency) as pool:
            asked = [pool.submit(_ask, servers[name], prompt, options.output_tokens) for prompt in prompts]
            outputs[name] = [each.result() for each in asked]
        if number >= WARM_UP_ROUNDS:
            times.seconds[name].append(time.perf_counter() - begin)
            times.processor[name].append(_processor_s(servers[name]) - before)
    if outputs[WITH] != outputs[WITHOUT]:
        raise TierCostError(f"the servers generated different tokens in round {number}")


def _prompts(number: int, options: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(f"round {number}")
    return [
        [rng.randrange(FIRST_TOKEN, FIRST_TOKEN + 200) for _ in range(options.prompt_tokens)]
        for _ in range(options.requests)
    ]


def _ask(server: Endpoint, prompt: list[int], output_tokens: int) -> list[int]:
    """Returns the output tokens of a prompt."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = complete(server, body | {"return_token_ids": True})["token_ids"]
    return tokens


def _processor_s(server: Endpoint) -> float:
    """Returns the processor seconds that the server and its agents have used since their start."""
    return fetch_metrics(server)[CPU_METRIC]


def _blocks(server: Endpoint, kind: str) -> float:
    """Returns the number of blocks that the tiers have stored (``stored``), or that requests found in the tiers
    (``hit``).
    """
    name = f"llm_serving_kv_tier_{kind}_blocks_total"
    return sum(value for each, value in fetch_metrics(server).items() if each.partition("{")[0] == name)


def _report(options: argparse.Namespace, times: Times, stored: float) -> int:
    ratios, tokens = _ratios(times.seconds), options.requests * options.output_tokens
    mean, error = _mean(ratios)
    processor, processor_error = _mean(_ratios(times.processor))
    rows = [[name, f"{fmean(each):.3f}", f"{tokens / fmean(each):.1f}"] for name, each in times.seconds.items()]
    print(format_table(["server", "seconds of a round", "output tokens/s"], rows))
    print(f"ratio {mean:.4f}, standard error {error:.4f}, {len(ratios)} rounds; {stored:g} blocks were stored")
    print(f"processor time: ratio {processor:.4f}, standard error {processor_error:.4f}")
    is_exceeded, is_kept = mean - 2 * error > options.limit, mean + 2 * error <= options.limit
    verdict = "is exceeded" if is_exceeded else "is kept" if is_kept else "is within two standard errors: undecided"
    print(f"limit {options.limit:g} {verdict}")
    content = {"config": options.config, "ssd": options.ssd, "seconds": times.seconds, "ratios": ratios}
    content |= {"ratio": mean, "standard_error": error, "stored_blocks": stored}
    content |= {"processor_ratio": processor, "processor_standard_error": processor_error}
    write_json(options.json, content)
    return 1 if is_exceeded else 0


def _mean(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of the ratios, and its standard error."""
    return fmean(ratios), stdev(ratios) / len(ratios) ** 0.5
