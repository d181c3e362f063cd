"""Measures other engines in the same way as bench_engine.py measures this engine, and prints a table with ratios.

A peer is NAME=KIND:PYTHON:MODEL, for example

    --peer "vLLM bf16=vllm:/tmp/peers/vllm/bin/python:/tmp/peers/llama-160m"
    --peer "OpenVINO int8=openvino:/tmp/peers/openvino/bin/python:/tmp/peers/ov-int8"
    --peer "llama.cpp Q4_0=llama_cpp:/tmp/peers/llamacpp/bin/python:/tmp/peers/gguf/Q4_0.gguf"

The figures of this engine come from JSON files of bench_engine.py, for example --ours int8=int8.json. The measured rows
of a peer are added to the file of --json, where they replace older rows of the same name. Peers can therefore be
measured one at a time. Without --peer the program prints the rows of this file.

With --auto the program installs the peers itself and measures all programs in alternating rounds, with the default
model. See ``--auto --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from performance.peers.driver import MARK
from performance.program import parse_count, parse_counts, write_json
from performance.terminal import format_number, format_table

FOLDER = Path(__file__).resolve().parent
KINDS = ("openvino", "vllm", "llama_cpp")
MAX_STEP_TOKENS = 4096
"""Maximum number of tokens in a step of an engine."""
OUTPUT_TAIL = 3000
"""Number of last characters of a failed engine's output that the error shows."""

Rows = dict[str, dict[str, Any]]
"""The measured table rows of an engine, by name, such as ``batch 8`` or ``prefill 1024``."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    kind: str
    python: str
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of this peer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison. Returns 0, or 1 if a peer failed; the other peers are measured nevertheless."""
    parsed = build_parser().parse_args(arguments)
    peers: dict[str, Rows] = json.loads(parsed.json.read_text()) if parsed.json and parsed.json.exists() else {}
    failures = 0
    for peer in parsed.peer:
        print(f"measuring {peer.name}", file=sys.stderr)
        rows, error = measure_peer(peer, parsed)
        if error is not None:
            print(f"error: {peer.name}: {error}", file=sys.stderr)
            failures += 1
        peers[peer.name] = peers.get(peer.name, {}) | rows
        if parsed.json:
            write_json(parsed.json, peers)
    ours = {name: engine_rows(json.loads(path.read_text())) for name, path in parsed.ours}
    print(comparison(ours, peers))
    if parsed.png is not None:
        from performance.bench.plots import plot_comparison

        plot_comparison(parsed.png, rates_of(ours, peers))
    return 1 if failures else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--auto", action="store_true", help="create and measure all peers; has options of its own")
    parser.add_argument("--peer", action="append", default=[], type=parse_peer, metavar="NAME=KIND:PYTHON:MODEL")
    parser.add_argument("--ours", action="append", default=[], type=parse_named_file, metavar="NAME=FILE")
    parser.add_argument("--batch", type=parse_counts, default=(1, 8, 32, 64, 128), help="default 1,8,32,64,128")
    parser.add_argument("--prompt", type=parse_count, default=64, help="default %(default)s")
    parser.add_argument("--new", type=parse_count, default=128, help="default %(default)s")
    parser.add_argument("--prefill", type=parse_counts, default=(1024,), help="default 1024")
    parser.add_argument("--no-prefill", action="store_true", help="measure only decode")
    parser.add_argument("--repeats", type=parse_count, default=3, help="default %(default)s")
    parser.add_argument("--threads", type=parse_count, default=2, help="default %(default)s")
    parser.add_argument("--vocab-size", type=parse_count, default=32000, help="default %(default)s")
    parser.add_argument("--timeout", type=float, default=600.0, help="maximum seconds per peer (default %(default)s)")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="flock: shared during loading, else exclusive")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file with the rows of all peers, which is updated")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture to this file")
    return parser


def parse_peer(text: str) -> Peer:
    name, _, rest = text.partition("=")
    parts = rest.split(":", 2)
    if len(parts) != 3 or parts[0] not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=KIND:PYTHON:MODEL, KIND one of {', '.join(KINDS)}")
    return Peer(name, *parts)


def parse_named_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=FILE")
    return name, Path(path)


def measure_peer(peer: Peer, parsed: argparse.Namespace) -> tuple[Rows, str | None]:
    """Runs the driver program of another engine. Returns the measured rows, and the reason of a failure or None."""
    request = {
        "model": peer.model,
        "batch": parsed.batch,
        "prompt": parsed.prompt,
        "new": parsed.new,
        "prefill": () if parsed.no_prefill else parsed.prefill,
        "repeats": parsed.repeats,
        "threads": parsed.threads,
        "vocab_size": parsed.vocab_size,
        "max_step_tokens": MAX_STEP_TOKENS,
        "lock": None if parsed.lock is None else str(parsed.lock),
    }
    command = [peer.python, str(FOLDER / f"{peer.kind}_driver.py"), json.dumps(request)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            environment = {**peer_environment(parsed.threads), **peer.environment}
            code = run_group(command, environment, output, parsed.timeout)
        except OSError as error:
            return {}, str(error)
        output.seek(0)
        text = output.read()
    if code is None:
        return peer_rows(text), f"it took more than {parsed.timeout:g} s"
    return peer_rows(text), f"it ended with {code}:\n{text[-OUTPUT_TAIL:]}" if code else None


def run_group(command: Sequence[str], environment: dict[str, str], output: IO[str], timeout_s: float) -> int | None:
    """Runs a program. Returns its exit code, or None if it took too long. Raises OSError if it cannot be started.

    At the end, kills all processes that the program started. Some peers leave processes, which would disturb the next
    measurement.
    """
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def peer_environment(threads: int) -> dict[str, str]:
    """Returns the environment of a peer: ``threads`` threads in every pool, no network, no telemetry.

    With these variables, vLLM runs in one process. In separate processes, its engine and its worker would spin while
    they wait for each other. On two cores that was several times slower.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def peer_rows(output: str) -> Rows:
    """Extracts the rows of results from the output of a peer's driver."""
    lines = (line for line in output.splitlines() if line.startswith(MARK))
    return {row_name(row): row for row in map(json.loads, (line.removeprefix(MARK) for line in lines))}


def engine_rows(result: Mapping[str, Any]) -> Rows:
    return {row_name(row): row for row in result["rows"]}


def row_name(row: Mapping[str, Any]) -> str:
    return f"batch {row['batch']}" if row["kind"] == "decode" else f"prefill {row['batch'] * row['prompt']}"


def rate(row: Mapping[str, Any] | None) -> float | None:
    """Returns the decode or prefill tokens per second of a row. None if there is no row, or if it has no rate."""
    if row is None:
        return None
    value: float | None = row["decode_tokens_per_s" if row["kind"] == "decode" else "prefill_tokens_per_s"]
    return value


def rates_of(ours: Mapping[str, Rows], peers: Mapping[str, Rows]) -> dict[str, dict[str, float | None]]:
    """Returns the rates by engine (outer key) and row (inner key). A missing rate is None.

    This engine is before the other engines, and decode rows are before prefill rows.
    """
    names = {name for rows in (*ours.values(), *peers.values()) for name in rows}
    ordered = sorted(names, key=lambda name: (name.split()[0], int(name.split()[1])))
    everyone = {**{f"ours {name}": rows for name, rows in ours.items()}, **peers}
    return {who: {name: rate(rows.get(name)) for name in ordered} for who, rows in everyone.items()}


def comparison(ours: Mapping[str, Rows], peers: Mapping[str, Rows]) -> str:
    """Returns tokens per second of all engines, and the ratios of this engine to each peer."""
    rates = rates_of(ours, peers)
    names = list(next(iter(rates.values()), {}))
    parts = [format_table(["tokens/s", *names], [[who, *map(format_number, of.values())] for who, of in rates.items()])]
    for our_name, our_rows in ours.items():
        lines = [[who, *(ratio(our_rows.get(name), rows.get(name)) for name in names)] for who, rows in peers.items()]
        if lines:
            parts.append(format_table([f"ours {our_name} /", *names], lines))
    return "\n\n".join(parts)


def ratio(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> str:
    mine, other = rate(ours), rate(theirs)
    return "-" if mine is None or not other else f"{mine / other:.2f}"
