"""Measures how much self-checks, API keys and the audit log slow a server down.

The program runs pairs of servers. The two servers of a pair run one after the other and get the same load. One server
has the self-checks at their defaults, API keys with quotas, and an audit log. The other server has none of these
features. The order and the seed change with every pair. The cost is the ratio of the two servers' mean times per output
token. The exit code is 1 if the median of the ratios exceeds the limit, or if requests failed. No other program may run
during the measurement.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_serving.access.keys import digest_of, new_secret
from performance.load.client import run_load
from performance.load.options import (
    LoadOptions,
    add_arrival_options,
    add_objective_options,
    add_workload_options,
    options_of,
)
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import LoadFigures, measure
from performance.program import EXIT_FAILURES, LoadTestError, exits_with_errors, new_parser, parse_count, write_json
from performance.terminal import format_number, format_table

MAX_RATIO = 1.01
OFF = ("serving_config.canary_interval_s=0", "serving_config.row_check_interval=0")
KEY_RIGHTS = "requests_in_flight=100000 requests_per_minute=1000000 tokens_per_minute=1000000000"


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Returns the exit code. 0 means success.

    1 means that the cost exceeds the limit or requests failed. 2 means that a server did not start.
    """
    parsed = _parser().parse_args(arguments)
    base = replace(options_of(parsed), plot=False)
    pairs = [_pair(parsed, base, number, program) for number in range(parsed.pairs)]
    ratios = [pair["on_tpot_ms"] / pair["off_tpot_ms"] for pair in pairs]
    results = {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "min": min(ratios),
        "max": max(ratios),
        "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,
        "limit": MAX_RATIO,
        "pass": statistics.median(ratios) <= MAX_RATIO,
        "pairs": pairs,
    }
    print(_text(results))
    write_json(parsed.json, results)
    return 0 if results["pass"] else EXIT_FAILURES


def _pair(parsed: argparse.Namespace, base: LoadOptions, number: int, program: Path) -> dict[str, float]:
    """Measures a server with self-checks, API keys and audit log, and one without, one after the other.

    Every other pair begins with the one without.
    """
    found = {}
    for name in ("on", "off") if number % 2 == 0 else ("off", "on"):
        options = replace(base, seed=base.seed + number)
        figures = _measure(parsed, name, options, program)
        found[f"{name}_tpot_ms"] = figures.tpot_ms.mean or float("inf")
        found[f"{name}_ttft_ms"] = figures.ttft_ms.mean or float("inf")
        print(f"pair {number + 1}/{parsed.pairs}, {name}: {found[f'{name}_tpot_ms']:.4f} ms per token", file=sys.stderr)
    return found


def _measure(parsed: argparse.Namespace, name: str, options: LoadOptions, program: Path) -> LoadFigures:
    with tempfile.TemporaryDirectory(prefix="reliability_cost_") as place:
        folder, secret = Path(place), new_secret()
        keys = folder / "keys.txt"
        keys.touch(mode=0o600)
        keys.write_text(f"client sha256:{digest_of(secret).hex()} {KEY_RIGHTS}\n")
        on = [f"serving_config.api_keys_file={keys}", f"serving_config.audit_log={folder}/audit.log"]
        settings = [*(on if name == "on" else OFF), *parsed.settings]
        with configured_server(name, parsed.config, settings, folder, parsed.start_timeout, program) as endpoint:
            run = run_load(replace(options, endpoint=endpoint, api_key=secret if name == "on" else None))
    if run.interrupted:
        raise KeyboardInterrupt
    figures = measure(run)
    if figures.failed:
        raise LoadTestError(f"requests failed: {figures.failures}")
    return figures


def _text(results: dict[str, Any]) -> str:
    rows = [
        [str(number), format_number(pair["on_tpot_ms"]), format_number(pair["off_tpot_ms"]), f"{ratio:.4f}"]
        for number, (pair, ratio) in enumerate(zip(results["pairs"], results["ratios"], strict=True), 1)
    ]
    error = results["standard_error"]
    spread = f"{results['min']:.4f} to {results['max']:.4f}"
    spread += "" if error is None else f", standard error of the mean {error:.4f}"
    verdict = "met" if results["pass"] else "MISSED"
    return (
        format_table(["pair", "on, ms per token", "off, ms per token", "ratio"], rows)
        + f"\n\n  ratio {results['ratio']:.4f} (median; {spread}); limit {results['limit']}: {verdict}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "llama_tiny_cpu.yaml", starts_servers=True)
    parser.add_argument("--pairs", type=parse_count, default=5, help="pairs of servers (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="maximum seconds per request")
    add_arrival_options(parser)
    add_workload_options(parser)
    add_objective_options(parser.add_argument_group("objectives"))
    parser.set_defaults(
        port=0, host="127.0.0.1", base_url=None, model=None, api="openai", api_key=None, warmup=8, output_dir=Path(),
        no_plot=True, token_ids=True, prompt_len=(32, 64), output_len=(64, 504), ignore_eos=True,
    )  # fmt: skip
    return parser
