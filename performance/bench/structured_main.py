"""Measures the cost of structured output.

1. The time to calculate a mask of allowed tokens, for random JSON schemas and a vocabulary of 131,072 made-up tokens:
   wall time and processor time. Other programs lengthen only the wall time.
2. The tokens per second of a server if all requests have a grammar, divided by the tokens per second without grammars.
   Rounds with and without grammars alternate. All texts have the same number of tokens. The program also prints the
   processor time that the server and its agents use for a token.

    python performance/bench_structured.py
    python performance/bench_structured.py --config llama_tiny_cpu.yaml --clients 16 --rounds 5 --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from llm_serving.constraints.compiler import GrammarCompiler
from llm_serving.constraints.grammar import schema_grammar
from llm_serving.engine.tokenizer import Tokenizer
from performance.load.endpoint import Endpoint
from performance.load.server_process import configured_server
from performance.program import client_threads, exits_with_errors, write_json

VOCAB_SIZE = 131_072
"""Number of tokens of the vocabulary."""
NUM_MASKS = 4000
"""Number of token masks that are measured."""
START_TIMEOUT_S = 600.0
"""Maximum seconds until the server has started."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class MadeUpTokenizer:
    """A vocabulary of all bytes, pieces of JSON, and random words with and without a leading space."""

    bos_token_id = None
    special_token_ids = frozenset({256})

    def __init__(self) -> None:
        rng = random.Random(0)
        words = [bytes([byte]) for byte in range(256)] + [b"", b'{"', b'":', b'",', b'"}', b'": "', b'", "', b"  "]
        seen = set(words)
        while len(words) < VOCAB_SIZE:
            word = "".join(rng.choices(LETTERS, k=rng.randint(2, 9))).encode()
            word = (b"", b" ", b'"')[rng.choice([0, 0, 1, 1, 2])] + word
            if word not in seen:
                seen.add(word)
                words.append(word)
        self._words = words
        self.vocab_size = VOCAB_SIZE

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints both costs. Returns the exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2_135m_cpu.yaml", help="deployment of the server")
    parser.add_argument("--clients", type=int, default=8, help="requests at the same time (8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (5)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(arguments)
    figures = mask_times()
    print(
        f"masks of {VOCAB_SIZE} tokens: p50 {figures['mask_p50_us']:.0f} us, p99 {figures['mask_p99_us']:.0f} us; "
        f"processor time {figures['mask_p50_cpu_us']:.0f} us, {figures['mask_p99_cpu_us']:.0f} us; {NUM_MASKS} masks"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        configured_server("structured", options.config, [], Path(folder), START_TIMEOUT_S) as endpoint,
    ):
        figures |= throughput(endpoint, options.clients, options.rounds)
    print(
        f"tokens/s with a grammar {figures['structured_tokens_s']:.1f}, without {figures['free_tokens_s']:.1f}: "
        f"median ratio {figures['ratio']:.3f}, {figures['ratio_low']:.3f} to {figures['ratio_high']:.3f}"
    )
    print(
        f"processor time for a token: with a grammar {figures['structured_cpu_us']:.0f} us, without "
        f"{figures['free_cpu_us']:.0f} us"
    )
    if options.json:
        write_json(Path(options.json), figures)
    return 0


def mask_times() -> dict[str, float]:
    """Generates random texts that fit random schemas, and measures the time of each mask of allowed tokens.

    Returns the median and the 99th percentile of the wall time and of the processor time, in microseconds.
    """
    rng = random.Random(1)
    compiler = GrammarCompiler(cast(Tokenizer, MadeUpTokenizer()), VOCAB_SIZE, [256])
    seconds: list[float] = []
    processor: list[float] = []
    while len(seconds) < NUM_MASKS:
        grammar = schema_grammar(random_schema(rng, 3))
        constraint = asyncio.run(compiler.compile(grammar, "schema")).start()
        for _ in range(100):
            start, processor_start = time.perf_counter(), time.thread_time()
            mask = constraint.mask()
            processor.append(time.thread_time() - processor_start)
            seconds.append(time.perf_counter() - start)
            token_id = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
            if token_id == 256:
                break
            constraint.advance(token_id)
    return {
        "mask_p50_us": 1e6 * statistics.median(seconds),
        "mask_p99_us": 1e6 * statistics.quantiles(seconds, n=100)[98],
        "mask_p50_cpu_us": 1e6 * statistics.median(processor),
        "mask_p99_cpu_us": 1e6 * statistics.quantiles(processor, n=100)[98],
    }


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Returns a schema with objects, lists, strings, numbers and fixed values."""
    kinds = ["string", "integer", "number", "boolean", "enum"] + ["object", "object", "array"] * (depth > 0)
    kind = rng.choice(kinds) if depth < 3 else "object"
    if kind == "enum":
        return {"enum": ["".join(rng.choices(LETTERS, k=6)) for _ in range(8)]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 5}
    if kind != "object":
        return {"type": kind}
    names = ["".join(rng.choices(LETTERS, k=5)) for _ in range(rng.randint(2, 8))]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": names[::2], "additionalProperties": False}


def throughput(endpoint: Endpoint, clients: int, rounds: int) -> dict[str, float]:
    """Returns tokens per second and processor time for a token, with and without a grammar.

    Each value is the median over alternating rounds.
    """
    common = {"prompt": "A list of things:", "max_tokens": 64, "temperature": 1}
    free = common | {"ignore_eos": True}
    schema = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 100}
    structured = common | {"structured_outputs": {"json": schema}}
    for body in (free, structured):
        run_round(endpoint, body, clients)
    pairs = [(run_round(endpoint, free, clients), run_round(endpoint, structured, clients)) for _ in range(rounds)]
    ratios = [with_grammar[0] / without[0] for without, with_grammar in pairs]
    return {
        "free_tokens_s": statistics.median(without[0] for without, _ in pairs),
        "structured_tokens_s": statistics.median(with_grammar[0] for _, with_grammar in pairs),
        "free_cpu_us": statistics.median(without[1] for without, _ in pairs),
        "structured_cpu_us": statistics.median(with_grammar[1] for _, with_grammar in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def run_round(endpoint: Endpoint, body: dict[str, Any], clients: int) -> tuple[float, float]:
    """Sends four requests for each client.

    Returns the output tokens per second, and the microseconds of processor time of server and agents for each token.
    """

    def client(number: int) -> int:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=300)
        tokens = 0
        for turn in range(4):
            content = json.dumps(body | {"seed": 4 * number + turn})
            connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            tokens += int(answer["usage"]["completion_tokens"])
        connection.close()
        return tokens

    start, processor_start = time.perf_counter(), processor_seconds()
    with client_threads(clients) as pool:
        total = sum(pool.map(client, range(clients)))
    seconds, processor = time.perf_counter() - start, processor_seconds() - processor_start
    return total / seconds, 1e6 * processor / total


def processor_seconds() -> float:
    """Returns the processor time of all processes that this program has started, in seconds."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)
