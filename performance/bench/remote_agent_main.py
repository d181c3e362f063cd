"""Compares an agent behind a network link with an agent on this machine: tokens per second, in alternating runs.

Starts a node (``llm-serving cluster host``) on the loopback address, so both agents have the same processor and the
same model. Only the transport of the steps differs: shared memory, or TLS to the node and shared memory on the node. In
each round, both engines generate tokens for the same requests, one engine after the other. The order changes with every
round. The ratio is the median of the rounds' ratios. The program also prints the processor time that the node, without
its agents, needs for a step. The exit code is 1 if a ratio is below --limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from llm_serving.cli import DEFAULT_CONFIG, add_model_options, load_for_model, short_overrides
from llm_serving.cluster.key import ClusterKey, make_key
from llm_serving.cluster.nodes import NodePool
from llm_serving.cluster.program import model_files
from llm_serving.cluster.remote_starter import RemoteStarter
from llm_serving.config import Config
from llm_serving.planning.machine import Machine
from performance.bench.engine import OfflineEngine, offline_engine
from performance.program import exits_with_errors, new_parser, write_json
from performance.terminal import format_table

ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Rates:
    """Tokens per second of one engine, one value for each round."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison and returns the exit code.

    0: success. 1: a ratio is below the limit. 2: a config is wrong, or an agent does not start.
    """
    parsed = _parse(arguments)
    overrides = [*short_overrides({"dtype": parsed.dtype, "quantize": parsed.quantize}), *parsed.overrides]
    config = load_for_model(
        *(parsed.config, parsed.model, ["serving_config.agent_ports=[0]", *overrides], Machine.detect()),
        offline=parsed.offline,
    )
    rows, results = [], []
    with ExitStack() as owned:
        local = owned.enter_context(offline_engine(config))
        remote, node = owned.enter_context(_remote_engine(config))
        for batch in parsed.batch:
            result = _measure({"local": local, "remote": remote}, node, parsed, batch, config)
            results.append(result)
            names = ("local_decode", "remote_decode", "decode_ratio", "prefill_ratio", "node_us_per_step")
            rows.append([str(batch), *(f"{result[name]:.3f}" for name in names)])
    headings = ["sequences", "local tokens/s", "remote tokens/s", "decode ratio", "prefill ratio", "node us/step"]
    print(format_table(headings, rows))
    write_json(parsed.json, {"model": config.model_name, "results": results})
    return 1 if min(result["decode_ratio"] for result in results) < parsed.limit else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_model_options(parser, DEFAULT_CONFIG)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences at a time (default 1 8)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of each prompt (default 128)")
    parser.add_argument("--new-tokens", type=int, default=128, help="output tokens of each sequence (default 128)")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (default 7)")
    parser.add_argument("--limit", type=float, default=0.97, help="smallest ratio of decode rates (default 0.97)")
    return parser.parse_args(arguments)


def _measure(
    engines: dict[str, OfflineEngine], node: psutil.Process, options: argparse.Namespace, batch: int, config: Config
) -> dict[str, float]:
    """Measures ``batch`` sequences in a warm-up round and ``options.rounds`` further rounds. Returns the medians."""
    rates = {name: Rates() for name in engines}
    node_s, node_steps = 0.0, 0
    for number in range(options.rounds + 1):
        order = list(engines) if number % 2 else list(reversed(engines))
        prompts = _prompts(number, batch, options.prompt_tokens, config.shape.vocab_size)
        for name in order:
            before = _processor_s(node)
            times = engines[name].generate(prompts, options.new_tokens)
            if number == 0:
                continue
            rates[name].decode.append(times.decoded_tokens / (times.end - times.prefilled))
            rates[name].prefill.append(batch * options.prompt_tokens / times.prefilled)
            if name == "remote":
                node_s, node_steps = node_s + _processor_s(node) - before, node_steps + len(times.steps)
    local, remote = rates["local"], rates["remote"]
    return {
        "batch": batch,
        "local_decode": median(local.decode),
        "remote_decode": median(remote.decode),
        "decode_ratio": median(far / near for far, near in zip(remote.decode, local.decode, strict=True)),
        "prefill_ratio": median(far / near for far, near in zip(remote.prefill, local.prefill, strict=True)),
        "node_us_per_step": 1e6 * node_s / max(1, node_steps),
    }


def _prompts(number: int, batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """Returns the prompts of one round. Each round has other prompts, so that no cached prefix helps."""
    return [
        [3 + (number * 7919 + sequence * 104729 + place * 31) % (vocab_size - 3) for place in range(length)]
        for sequence in range(batch)
    ]


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _remote_engine(config: Config) -> Iterator[tuple[OfflineEngine, psutil.Process]]:
    """Starts a node, and an engine whose agent runs on this node. Yields the engine and the node's process."""
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="bench_remote_")))
        key = folder / "cluster.key"
        make_key(key)
        command = [sys.executable, "-P", "-m", "llm_serving.agent_host", "--listen", "127.0.0.1:0", "--with-stdin"]
        with (folder / "node.txt").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--key-file", str(key), "--log-folder", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        owned.callback(process.wait)
        assert process.stdin is not None
        assert process.stdout is not None
        owned.callback(process.stdin.close)
        address = process.stdout.readline().decode().split()[-1]
        pool = NodePool(ClusterKey(str(key)))
        owned.callback(pool.close)
        files = model_files(config)
        starter = RemoteStarter(config, 0, pool, lambda: files, lambda *progress: None)
        pool.add(address)
        yield owned.enter_context(offline_engine(config, starter)), psutil.Process(process.pid)
