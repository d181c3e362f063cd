"""Measures the time to first token of sessions whose blocks come from host memory, and from an SSD after a restart.

A session is a long prompt. The device's cache holds one and a half sessions, so each session evicts the previous one.
The first server computes all sessions, and afterwards loads them from its host memory. The second server loads them
from the SSD. Both servers also compute sessions that no tier has. A ratio is the median time of computed sessions
divided by the median time of loaded sessions. The response for a loaded session must have the same tokens and
log-probabilities as the response for the computed session.

    python performance/bench_kv_tiers.py
    python performance/bench_kv_tiers.py --config llama_tiny_cpu.yaml --tokens 400 --sessions 3
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from performance.bench.completion import REQUEST_TIMEOUT_S, complete
from performance.load.endpoint import Endpoint
from performance.load.server_process import configured_server
from performance.program import LoadTestError, exits_with_errors, new_parser, parse_count, positive, write_json
from performance.terminal import format_table

GOALS = {"memory": 8.0, "ssd": 4.0}
BLOCK_TOKENS = 16
"""Tokens of a KV block."""
FIRST_TOKEN = 10
"""Smallest token id in prompts."""
WRITE_TIMEOUT_S = 60.0
"""Maximum seconds to wait until the tiers have stored the expected number of blocks."""

Answers = dict[int, Any]
"""For each session's number: ``choices[0]`` of the server's first response."""


class TierBenchmarkError(LoadTestError):
    """Raised if a response is wrong, or if blocks do not come from the tier that is measured."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints times and ratios, and returns 0. Returns 2 if a server or a response is wrong."""
    options = _parse(arguments)
    times: dict[str, list[float]] = {"computed": [], "memory": [], "ssd": []}
    with TemporaryDirectory(prefix="kv-tiers-", dir=options.folder) as folder:
        settings, answers = _settings(options, Path(folder)), Answers()
        sessions = range(options.sessions)
        with _server(options, settings, Path(folder) / "first") as server:
            _ask(server, _prompt(options, -1))
            _wait_until(server, "stored_blocks_total", options.tokens // BLOCK_TOKENS)
            for number in sessions:
                times["computed"].append(_timed(server, options, number, answers))
                _wait_until(server, "stored_blocks_total", (2 + number) * (options.tokens // BLOCK_TOKENS))
            times["memory"] += [_timed(server, options, number, answers) for number in sessions]
            _check_hits(server, "host", options)
            _wait_until(server, "ssd_written_blocks_total", options.sessions * (options.tokens // BLOCK_TOKENS))
        with _server(options, settings, Path(folder) / "second") as server:
            _ask(server, _prompt(options, -2))
            times["ssd"] += [_timed(server, options, number, answers) for number in sessions]
            _check_hits(server, "ssd", options)
            more = range(options.sessions, 2 * options.sessions)
            times["computed"] += [_timed(server, options, number, answers) for number in more]
    _report(options, times)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="smollm2_135m_cpu.yaml", help="config (default smollm2_135m_cpu.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting")
    parser.add_argument("--tokens", type=parse_count, default=1000, help="tokens of a session (default 1000)")
    parser.add_argument("--sessions", type=parse_count, default=6, help="number of sessions (default 6)")
    parser.add_argument("--folder", type=Path, help="folder on the SSD to measure (default: the system's for tests)")
    parser.add_argument("--start-timeout", type=positive, default=300.0, help="seconds for a start (default 300)")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace, folder: Path) -> list[str]:
    length = options.tokens + 2 * BLOCK_TOKENS
    blocks = -(-length // BLOCK_TOKENS)
    return [
        f"pa_config.block_size={BLOCK_TOKENS}",
        f"pa_config.decode_seq_length={length}",
        f"pa_config.num_blocks={1 + blocks + blocks // 2}",
        "serving_config.canary_interval_s=0",
        f"kv_tier_config.host_blocks={(2 * options.sessions + 2) * blocks}",
        f"kv_tier_config.ssd_folder={folder / 'tier'}",
        "kv_tier_config.loads=always",
        *options.set,
    ]


def _server(options: argparse.Namespace, settings: list[str], folder: Path) -> Any:
    folder.mkdir()
    return configured_server("tiers", options.config, settings, folder, options.start_timeout)


def _prompt(options: argparse.Namespace, number: int) -> list[int]:
    rng = random.Random(f"session {number}")  # a text, as the seeds -1 and 1 give equal prompts
    return [rng.randrange(FIRST_TOKEN, FIRST_TOKEN + 200) for _ in range(options.tokens)]


def _ask(server: Endpoint, prompt: list[int]) -> Any:
    """Generates one token for a prompt. Returns ``choices[0]`` of the response."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    return complete(server, body)


def _timed(server: Endpoint, options: argparse.Namespace, number: int, answers: Answers) -> float:
    """Generates one token for a session and returns the seconds until the response.

    Raises TierBenchmarkError if the response differs from the session's first response.
    """
    prompt = _prompt(options, number)
    start = time.perf_counter()
    choice = _ask(server, prompt)
    seconds = time.perf_counter() - start
    if answers.setdefault(number, choice) != choice:
        raise TierBenchmarkError(f"the response of session {number} differs from its first response")
    return seconds


def _metric(server: Endpoint, name: str) -> float:
    _, _, body = server.get("/metrics", REQUEST_TIMEOUT_S)
    found = re.search(rf"^llm_serving_kv_tier_{re.escape(name)} (\S+)$", body.decode(), re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def _check_hits(server: Endpoint, tier: str, options: argparse.Namespace) -> None:
    """Raises TierBenchmarkError if fewer than 90 % of the sessions' blocks came from a tier."""
    wanted = options.sessions * (options.tokens // BLOCK_TOKENS)
    hits = _metric(server, f'hit_blocks_total{{tier="{tier}"}}')
    if hits < 0.9 * wanted:
        raise TierBenchmarkError(f"only {hits:g} of {wanted} blocks came from the tier {tier}")


def _wait_until(server: Endpoint, name: str, wanted: int) -> None:
    """Waits until a metric of the tiers is at least ``wanted``.

    The tiers copy the blocks of a session during later steps. If the next session evicts a block before it is copied,
    the tiers do not get it. Therefore the benchmark waits after each session until its blocks are stored.
    """
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while (found := _metric(server, name)) < wanted:
        if time.monotonic() > deadline:
            raise TierBenchmarkError(f"{name} is {found:g} after {WRITE_TIMEOUT_S:g} s; {wanted} blocks were expected")
        time.sleep(0.05)


def _report(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    medians = {name: median(values) for name, values in times.items()}
    ratios = {name: medians["computed"] / medians[name] for name in GOALS}
    rows = [["computed", f"{1000 * medians['computed']:.1f}", "1.0", ""]]
    rows += [[name, f"{1000 * medians[name]:.1f}", f"{ratios[name]:.1f}", f"{goal:g}"] for name, goal in GOALS.items()]
    print(format_table(["blocks from", "median ms", "times faster", "goal"], rows))
    milliseconds = {name: [1000 * value for value in values] for name, values in times.items()}
    content = {"config": options.config, "tokens": options.tokens, "times_ms": milliseconds, "ratios": ratios}
    write_json(options.json, content)
