"""Measures hand-overs of computed prompts: copies with checksums, transfers over TCP, and the time between tokens.

1. Copies on one machine: a prompt's blocks go to the hand-over pool and from there to another cache, with headers and
   checksums. The rate is compared with a plain copy of the same blocks by the same threads (memcpy). As in a server,
   the blocks are scattered in the caches, and the pool is in /dev/shm. The rate of copying one large buffer is printed
   for comparison.
2. Transfers over the loopback address. The rate of ``TcpTransport`` is compared with that of a bare socket that sends
   the same bytes. The option ``--parts tls`` measures this with TLS 1.3, which nodes use. The bare socket then has the
   same TLS settings. With ``--parts mooncake``, Mooncake reads the contents of the blocks. This part has no goal.
3. Host blocks of a node, which KV tiers in folders and stored sessions use. Reads and writes with TLS 1.3 are
   compared with a bare socket, and with requests that have only one block each.
4. Time between tokens. A server with a prefill replica and a decode replica streams the outputs of short prompts, first
   alone and then while long prompts arrive. For comparison, two replicas without roles get the same requests.

The rates of parts 1 to 3 are medians of alternating rounds. The exit code is 1 if a goal is missed. Copies must reach
at least 0.4 of the rate of memcpy. Transfers, and reads and writes of host blocks, must reach at least 0.7 of the rate
of a bare socket, with TLS and without. While long prompts arrive, the p99 of the time between tokens must be at most
1.3 times the p99 without long prompts.

    python performance/bench_kv_transfer.py
    python performance/bench_kv_transfer.py --parts copy tcp tls pool
    python performance/bench_kv_transfer.py --parts mooncake
"""

from __future__ import annotations

import argparse
import http.client
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson

from agent.kernels import BlockCopies, BlockHandOvers, num_threads, set_threads
from agent.weights.storage import zeros
from llm_serving.cluster.key import ClusterKey, make_key
from llm_serving.handover.header import HEADER_BYTES
from llm_serving.handover.transport import Array
from llm_serving.ipc.hand_over_memory import HandOverLayout, HandOverMemory
from llm_serving.ipc.shm import MoveKind
from performance.bench.block_transfers import (
    GIGA,
    REQUEST_TIMEOUT_S,
    Results,
    TransferBenchmarkError,
    TransferSizes,
    alternate,
    mooncake_rates,
    pool_rates,
    print_rates,
    transfer_rates,
)
from performance.load.endpoint import Endpoint
from performance.load.server_process import configured_server
from performance.program import exits_with_errors, new_parser, parse_count, positive, write_json
from performance.terminal import format_table

GOALS = {"copy": 0.4, "tcp": 0.7, "tls": 0.7, "pool": 0.7, "tokens": 1.3}
PARTS = (*GOALS, "mooncake")
FIRST_TOKEN = 10
"""Smallest token id in prompts."""
@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints rates and ratios. Returns 1 if a goal is missed, and 2 if a block or a response is wrong."""
    options = _parse(arguments)
    results: Results = {}
    if "copy" in options.parts:
        results |= _copies(options)
    sizes = TransferSizes(options.arrays, options.blocks, options.part_bytes, options.rounds)
    if "tcp" in options.parts:
        results |= transfer_rates(sizes, "tcp", None)
    with TemporaryDirectory(prefix="kv-transfer-") as folder:
        path = Path(folder) / "cluster.key"
        make_key(path)
        key = ClusterKey(str(path))
        if "tls" in options.parts:
            results |= transfer_rates(sizes, "tls", key)
        if "pool" in options.parts:
            results |= pool_rates(sizes, key)
    if "mooncake" in options.parts:
        results |= mooncake_rates(sizes)
    if "tokens" in options.parts:
        results |= _token_times(options)
    write_json(options.json, results)
    missed = [
        *(["copy"] if results.get("copy_ratio", 1.0) < GOALS["copy"] else []),
        *(part for part in ("tcp", "tls", "pool") if results.get(f"{part}_ratio", 1.0) < GOALS[part]),
        *(["tokens"] if results.get("roles_ratio", 1.0) > GOALS["tokens"] else []),
    ]
    print(f"goals missed: {', '.join(missed)}" if missed else "all goals are reached")
    return 1 if missed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(GOALS))
    parser.add_argument("--arrays", type=parse_count, default=60, help="arrays of the KV cache (default 60: 30 layers)")
    parser.add_argument("--part-bytes", type=parse_count, default=6144, help="bytes of a block in an array (6144)")
    parser.add_argument("--blocks", type=parse_count, default=128, help="blocks of a hand-over (default 128)")
    parser.add_argument("--cache-blocks", type=parse_count, default=2048, help="blocks of a KV cache (default 2048)")
    parser.add_argument("--threads", type=parse_count, default=1, help="threads of the copies (default 1)")
    parser.add_argument("--rounds", type=parse_count, default=15, help="rounds of copies and transfers (default 15)")
    parser.add_argument("--config", default="smollm2_135m_cpu.yaml", help="config of the servers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting")
    parser.add_argument("--streams", type=parse_count, default=4, help="streams whose tokens are timed (default 4)")
    parser.add_argument("--output-tokens", type=parse_count, default=256, help="tokens of each stream (default 256)")
    parser.add_argument("--prompt-tokens", type=parse_count, default=1000, help="length of long prompts (default 1000)")
    parser.add_argument("--long-pause", type=float, default=0.2, help="seconds between long prompts (default 0.2)")
    parser.add_argument("--passes", type=parse_count, default=2, help="times that the streams run (default 2)")
    parser.add_argument("--start-timeout", type=positive, default=300.0, help="seconds for a start (default 300)")
    return parser.parse_args(arguments)


# Part 1 of the benchmark: copies on one machine, between the KV cache and the hand-over pool.


def _copies(options: argparse.Namespace) -> Results:
    """Compares a hand-over through the pool with a plain copy of the same blocks."""
    before = num_threads()
    set_threads(options.threads)
    try:
        return _timed_copies(options)
    finally:
        set_threads(before)


def _timed_copies(options: argparse.Namespace) -> Results:
    rng, count = np.random.default_rng(0), options.blocks
    shape = (max(options.cache_blocks, 1 + count), options.part_bytes)
    source, target = ([zeros(shape, "uint8") for _ in range(options.arrays)] for _ in range(2))
    for array in source:
        array[:] = rng.integers(0, 256, shape, np.uint8)
    blocks = 1 + rng.permutation(shape[0] - 1)[:count]
    memory = HandOverMemory.create(HandOverLayout(options.arrays, count, options.part_bytes))
    try:
        seconds = _copy_seconds(options.rounds, source, target, memory, blocks)
    finally:
        memory.close()
    if any((a[blocks] != b[blocks]).any() for a, b in zip(source, target, strict=True)):
        raise TransferBenchmarkError("the received blocks differ from the sent blocks")
    num_bytes = count * options.arrays * options.part_bytes
    rates = {name: num_bytes / one / GIGA for name, one in seconds.items()}
    rates["hand-over (to and from)"] = hand_over = num_bytes / (seconds["to pool"] + seconds["from pool"]) / GIGA
    print(f"copies of {num_bytes / 1e6:.1f} MB in {count} blocks, threads: {options.threads}")
    print_rates("copy", rates, "memcpy", "of memcpy")
    return {
        "memcpy_gb_s": rates["memcpy"],
        "one_buffer_gb_s": rates["memcpy of one buffer"],
        "hand_over_gb_s": hand_over,
        "copy_ratio": hand_over / rates["memcpy"],
    }


def _copy_seconds(
    rounds: int, source: list[Array], target: list[Array], memory: HandOverMemory, blocks: Array
) -> dict[str, float]:
    count = len(blocks)
    out, into = (BlockHandOvers(arrays, memory.blocks, memory.headers) for arrays in (source, target))
    headers = np.random.default_rng(1).integers(0, 256, count * HEADER_BYTES, np.uint8)
    faults = np.zeros(count, np.int32)
    out_moves = np.array([(MoveKind.HAND_OUT, block, host) for host, block in enumerate(blocks)], np.int32)
    in_moves = np.array([(MoveKind.HAND_IN, host, block) for host, block in enumerate(blocks)], np.int32)
    copies = BlockCopies(source, target)
    copy_moves = np.array([(MoveKind.SWAP_OUT, block, block) for block in blocks], np.int32)
    large, copy = memory.blocks.copy(), memory.blocks.copy()
    seconds = alternate(
        {
            "memcpy": lambda: copies.run(copy_moves),
            "memcpy of one buffer": lambda: np.copyto(copy, large),
            "to pool": lambda: out.run(out_moves, headers, faults),
            "from pool": lambda: into.run(in_moves, headers, faults),
        },
        rounds,
    )
    if faults.any():
        raise TransferBenchmarkError("the checksum of a received block is wrong")
    return seconds


# Part 4 of the benchmark: the time between tokens while long prompts arrive.


def _token_times(options: argparse.Namespace) -> Results:
    """Compares the time between tokens with and without long prompts, for replicas with and without roles."""
    results: Results = {}
    rows = []
    for name, roles in (("roles", ["parallel_config.roles=[prefill, decode]"]), ("no_roles", [])):
        with TemporaryDirectory(prefix="kv-transfer-") as folder:
            settings = ["parallel_config.data_parallel=2", "serving_config.agent_ports=[0, 0]", *roles]
            settings += ["serving_config.canary_interval_s=0", "speculative_config.method=off", *options.set]
            with configured_server(name, options.config, settings, Path(folder), options.start_timeout) as server:
                _stream(server, _prompt(64, "warm-up"), 16)
                _ask(server, _prompt(options.prompt_tokens, "warm-up"))
                alone, texts = _run_streams(server, options, with_long=False)
                busy, same = _run_streams(server, options, with_long=True)
                figures = orjson.loads(server.get("/server_info", REQUEST_TIMEOUT_S)[2])["engine"].get("hand_overs")
        if texts != same:
            raise TransferBenchmarkError("long prompts changed the text of a stream")
        if roles and not figures["completed"]:
            raise TransferBenchmarkError(f"no prompt was handed over: {figures}")
        ratio = busy["p99"] / alone["p99"]
        results |= {f"{name}_alone_p99_ms": alone["p99"], f"{name}_busy_p99_ms": busy["p99"], f"{name}_ratio": ratio}
        label = "prefill, decode" if roles else "none"
        rows.append([label, *(f"{one[key]:.1f}" for one in (alone, busy) for key in ("p50", "p99")), f"{ratio:.2f}"])
    headings = ["roles", "p50 ms", "p99 ms", "p50 ms, long prompts", "p99 ms, long prompts", "ratio of p99"]
    print(f"time between tokens of {options.streams} streams, long prompts of {options.prompt_tokens} tokens")
    print(format_table(headings, rows))
    return results


def _run_streams(
    server: Endpoint, options: argparse.Namespace, *, with_long: bool
) -> tuple[dict[str, float], list[list[int]]]:
    """Runs the streams of short prompts. Returns percentiles of the time between tokens in ms, and all tokens.

    ``with_long`` also sends long prompts meanwhile.
    """
    gaps: list[float] = []
    texts: list[list[int]] = []
    stop = threading.Event()
    long_prompts = threading.Thread(target=_send_long, args=(server, options, stop))
    if with_long:
        long_prompts.start()
    try:
        for turn in range(options.passes):
            taken: list[tuple[list[float], list[int]]] = [([], [])] * options.streams

            def stream(index: int, turn: int = turn, taken: list[tuple[list[float], list[int]]] = taken) -> None:
                prompt = _prompt(48, f"stream {turn} {index}")
                taken[index] = _stream(server, prompt, options.output_tokens)

            threads = [threading.Thread(target=stream, args=(index,)) for index in range(options.streams)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for times, tokens in taken:
                gaps += np.diff(times).tolist()
                texts.append(tokens)
    finally:
        stop.set()
        if with_long:
            long_prompts.join()
    if not gaps or any(len(tokens) != options.output_tokens for tokens in texts):
        raise TransferBenchmarkError("a stream did not get all tokens")
    return {f"p{part}": 1e3 * float(np.percentile(gaps, part)) for part in (50, 99)}, texts


def _send_long(server: Endpoint, options: argparse.Namespace, stop: threading.Event) -> None:
    """Sends one long prompt after the other, and generates few tokens for each."""
    number = 0
    while not stop.is_set():
        _ask(server, _prompt(options.prompt_tokens, f"long {number}"))
        number += 1
        stop.wait(options.long_pause)


def _prompt(length: int, name: str) -> list[int]:
    seed = int.from_bytes(name.encode(), "little")
    digits = np.random.default_rng(seed).integers(FIRST_TOKEN, FIRST_TOKEN + 200, length)
    tokens: list[int] = digits.tolist()
    return tokens


def _ask(server: Endpoint, prompt: list[int]) -> None:
    _stream(server, prompt, 4)


def _stream(server: Endpoint, prompt: list[int], num_tokens: int) -> tuple[list[float], list[int]]:
    """Returns the times at which pieces arrived, usually with one token each, and all tokens. Times are seconds."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip
    times: list[float] = []
    tokens: list[int] = []
    connection = http.client.HTTPConnection(server.host, server.port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", orjson.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise TransferBenchmarkError(f"the server refused a request: {response.read().decode()}")
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            choices = orjson.loads(line[6:]).get("choices")
            if choices and (new := choices[0].get("token_ids")):
                times.append(time.perf_counter())
                tokens += new
    except (OSError, http.client.HTTPException) as error:
        raise TransferBenchmarkError(f"the server did not respond: {error}") from error
    finally:
        connection.close()
    return times, tokens
