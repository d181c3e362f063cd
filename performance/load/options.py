"""Defines the command line of the load test."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_serving.config.serving_section import DEFAULT_SERVER_PORT
from performance.load.apis import APIS, OPENAI_APIS
from performance.load.arrivals import ARRIVALS, arrival_times, request_count
from performance.load.endpoint import Endpoint, parse_endpoint
from performance.load.workload import (
    FIRST_PLAIN_TOKEN,
    LoadRequest,
    dataset_workload,
    text_workload,
    token_workload,
    with_beginnings,
)
from performance.program import Range, UsageError, parse_range, positive

DESCRIPTION = """\
Sends requests at a given rate, whether or not the server keeps up (open loop). Latencies count from the time at which a
request was sent. Writes a JSON file with every request, and a picture of the run."""

API_KEY_VARIABLE = "LLM_SERVING_API_KEY"
"""Environment variable with the API key. Other users of the machine cannot read it, unlike a command line."""

WORKLOAD_FIELDS = (
    "dataset",
    "token_ids",
    "vocab_size",
    "prompt_len",
    "output_len",
    "temperature",
    "ignore_eos",
    "return_token_ids",
    "beginnings",
)

OPTION_FIELDS = (
    *("rate", "duration", "api", "model", "arrivals", "seed", "api_key", "warmup", "output_dir"),
    *("slo_ttft_ms", "slo_tpot_ms", "slo_tbt_ms"),
)
"""Fields of ``LoadOptions`` that have a command-line option of the same name. ``WORKLOAD_FIELDS`` lists further fields,
which describe prompts.
"""

EPILOG = """\
exit code: 0 all requests succeeded, 1 some failed, 2 no server or wrong options, 130 interrupted

examples:
  %(prog)s -X 10 -T 30
  %(prog)s -X 5 -T 60 --prompt-len 100:200 --output-len 64:128 -O results
  %(prog)s -X 2 -T 30 --base-url http://HOST:8000/v1 --model NAME

data set: one JSON object per line, {"prompt": "text" or [token ids], "max_tokens": 64} or {"messages": [...]}"""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of a load test. Two runs with equal options send the same requests at the same times."""

    endpoint: Endpoint
    rate: float = 10.0
    duration: float = 30.0
    api: str = "openai"
    model: str | None = None
    arrivals: str = "poisson"
    seed: int = 0
    dataset: Path | None = None
    token_ids: bool = False
    vocab_size: int = 1000
    prompt_len: Range = (8, 48)
    output_len: Range = (16, 64)
    temperature: float = 0.0
    ignore_eos: bool = False
    return_token_ids: bool = False
    beginnings: tuple[int, int] = (0, 0)
    """Number of shared prompt prefixes, and their length in words or tokens. (0, 0) means none."""
    keep_text: bool = False
    """If True, records contain the text of the responses."""
    api_key: str | None = None
    warmup: int = 0
    timeout_s: float = 600.0
    slo_ttft_ms: float = 1000.0
    slo_tpot_ms: float = 100.0
    slo_tbt_ms: float | None = None
    output_dir: Path = Path()
    json_path: Path | None = None
    plot: bool = True

    @property
    def count(self) -> int:
        return request_count(self.rate, self.duration)

    def arrival_times(self) -> list[float]:
        return arrival_times(self.arrivals, self.rate, self.duration, self.seed)

    def workload(self, count: int, seed: int) -> list[LoadRequest]:
        """Returns the requests of a run. Raises ``UsageError`` if ``api`` cannot express one of them."""
        requests = self.requests(count, seed)
        APIS[self.api].check(requests)
        return requests

    def requests(self, count: int, seed: int) -> list[LoadRequest]:
        """Returns the requests of a run. Does not check whether ``api`` can express them."""
        if self.dataset is not None:
            return dataset_workload(self.dataset, count, seed, self.output_len)
        if self.token_ids:
            made = token_workload(count, seed, self.prompt_len, self.output_len, self.vocab_size)
        else:
            made = text_workload(count, seed, self.prompt_len, self.output_len)
        return with_beginnings(made, *self.beginnings, seed, self.vocab_size) if self.beginnings[0] else made


def _beginnings(text: str) -> tuple[int, int]:
    """Parses the number of shared prompt prefixes and their length in words or tokens, such as ``64x1000``."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of beginnings and their length, such as 64x1000")
    return int(found[1]), int(found[2])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load = add_arrival_options(parser)
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="requests before the measurement")
    load.add_argument("--timeout", type=positive, default=600.0, help="maximum seconds per request (default 600)")
    add_workload_options(parser)
    server = parser.add_argument_group("server")
    server.add_argument("-P", "--port", type=int, default=DEFAULT_SERVER_PORT, help="default %(default)s")
    server.add_argument("--host", default="127.0.0.1", help="default %(default)s")
    server.add_argument("--base-url", metavar="URL", help="any OpenAI-compatible server, instead of host and port")
    server.add_argument("--model", help="model name (default: the first of /v1/models)")
    server.add_argument("--api", choices=sorted(APIS), default="openai", help="default %(default)s")
    server.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE),
        help=f"sent as a bearer token (default: the environment variable {API_KEY_VARIABLE})",
    )
    result = parser.add_argument_group("result")
    result.add_argument("-O", "--output-dir", type=Path, default=Path(), help="folder for JSON and PNG (default .)")
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON to this file")
    result.add_argument("--no-plot", action="store_true", help="write no PNG")
    add_objective_options(result)
    return parser


def add_arrival_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the options of the request rate and the arrival times, which the simulator also uses."""
    load = parser.add_argument_group("load")
    load.add_argument("-X", "--rate", type=positive, default=10.0, help="requests per second (default %(default)s)")
    load.add_argument("-T", "--duration", type=positive, default=30.0, help="seconds of arrivals (default %(default)s)")
    load.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="default %(default)s")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, prompts and lengths (default %(default)s)")
    return load


def add_objective_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options for latency objectives (SLO), which the simulator also uses."""
    group.add_argument("--slo-ttft-ms", type=positive, default=1000.0, help="objective (default %(default)s)")
    group.add_argument("--slo-tpot-ms", type=positive, default=100.0, help="objective (default %(default)s)")
    group.add_argument("--slo-tbt-ms", type=positive, help="objective for a request's longest time between tokens")


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of prompts, for the load test and the programs that compare servers."""
    group = parser.add_argument_group("prompts")
    group.add_argument("--dataset", type=Path, metavar="FILE", help="JSONL file of prompts, see below")
    group.add_argument("--token-ids", action="store_true", help="prompts of random token ids (--api openai)")
    group.add_argument("--vocab-size", type=int, default=1000, help="upper limit of random ids (default %(default)s)")
    group.add_argument(
        "--prompt-len", type=parse_range, default=(8, 48), metavar="A:B", help="words, or token ids (default 8:48)"
    )
    group.add_argument(
        "--output-len", type=parse_range, default=(16, 64), metavar="A:B", help="max_tokens (default 16:64)"
    )
    group.add_argument(
        "--beginnings",
        type=_beginnings,
        default=(0, 0),
        metavar="NxL",
        help="put one of N common beginnings of L words or token ids before each prompt (for prefix caches)",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="default %(default)s: greedy")
    group.add_argument("--ignore-eos", action="store_true", help="always generate max_tokens tokens")
    group.add_argument("--return-token-ids", action="store_true", help="let the server return token ids; count these")


def parse_options(arguments: Sequence[str] | None = None) -> LoadOptions:
    """Parses the command line. Exits with 2 on a wrong option; raises ``UsageError`` on a wrong combination."""
    return options_of(build_parser().parse_args(arguments))


def options_of(parsed: argparse.Namespace) -> LoadOptions:
    """Converts parsed arguments of ``build_parser`` to options. Raises ``UsageError`` on a wrong combination."""
    if request_count(parsed.rate, parsed.duration) < 1:
        raise UsageError(f"-X {parsed.rate:g} for -T {parsed.duration:g} seconds makes no request: raise one of them")
    if parsed.token_ids and parsed.vocab_size <= FIRST_PLAIN_TOKEN:
        raise UsageError(f"--vocab-size {parsed.vocab_size}: token ids start at {FIRST_PLAIN_TOKEN}")
    if parsed.warmup < 0:
        raise UsageError(f"--warmup {parsed.warmup}: the minimum is 0")
    if (parsed.ignore_eos or parsed.return_token_ids) and parsed.api not in OPENAI_APIS:
        raise UsageError(f"--api {parsed.api} supports neither --ignore-eos nor --return-token-ids: use --api openai")
    return LoadOptions(
        endpoint=parse_endpoint(parsed.base_url) if parsed.base_url else Endpoint(parsed.host, parsed.port),
        timeout_s=parsed.timeout,
        json_path=parsed.json,
        plot=not parsed.no_plot,
        **workload_options(parsed),
        **{name: getattr(parsed, name) for name in OPTION_FIELDS},
    )


def workload_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of ``LoadOptions`` that the options of ``add_workload_options`` set, with their values.

    Raises ``UsageError`` on a wrong combination.
    """
    if parsed.dataset is not None and parsed.beginnings[0]:
        raise UsageError("--beginnings applies to generated prompts; a data set has its own prompts")
    return {field: getattr(parsed, field) for field in WORKLOAD_FIELDS}
