"""Compares the peak memory of a server under load with its memory plan.

The program starts a server and sends as many requests as can run together, all at the same time. One of them has the
longest context, and its prompt fills a step. The program samples the memory of all processes during the start and under
load. Memory that processes share counts once. The program prints the plan, the peak, and their ratio for each of these
parts:

    weights, KV cache   bytes of the agents' arrays, as the agents report them
    agents: the rest    all other memory of the agents: activations, logits, scratch memory, Python, MindSpore, graphs
    server              HTTP, scheduler, tokenizer

The weight cache on disk is empty at the first of two starts, so this start converts the weights and compiles the graph.
The second start finds weights and graph on disk. The exit code is 1 if a peak under load is above 1.2 times the plan.

    python performance/bench_memory.py
    python performance/bench_memory.py --config llama_tiny_cpu.yaml --json FILE
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_serving.cli import load_for_model
from llm_serving.config import Config
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import MemoryPlan, estimate_memory
from llm_serving.planning.rank_memory import KV_CACHE, WEIGHTS
from performance.bench.process_memory import Usage, usage_of_children
from performance.load.endpoint import Endpoint
from performance.load.server_process import configured_server
from performance.load.watches import fetch_metrics, sampled
from performance.load.workload import FIRST_PLAIN_TOKEN
from performance.program import EXIT_FAILURES, LoadTestError, client_threads, exits_with_errors, new_parser, write_json

MOST = 1.2
"""Maximum ratio of the peak memory to the plan."""
INTERVAL_S = 0.5
"""Seconds between two readings of the memory."""
SETTLED_S = 10.0
"""The program stops sampling when the memory has not grown for this time. Until then, the agents allocate the pages of
the KV cache.
"""
SETTLED_BYTES = 1 << 20
"""The memory has settled if it grows by at most this number of bytes within ``SETTLED_S`` seconds."""
MIB = 1 << 20
SHORT_PROMPT, OUTPUT = 16, 16
"""Tokens of a short prompt, and tokens of each output."""
REQUEST_TIMEOUT_S = 3600.0
"""Maximum seconds of a request, and from the last response until the memory has settled."""
STARTS = ("first start", "second start")
SERVER, REST = "server", "agents: the rest"


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the memory. Returns 1 if a peak under load is too far above the plan."""
    parser = new_parser(__doc__, "smollm2_135m_cpu.yaml", starts_servers=True)
    options = parser.parse_args(arguments)
    settings = [*options.settings, "serving_config.canary_interval_s=0"]
    machine = Machine.detect()
    config = load_for_model(options.config, None, settings, machine)
    plan = estimate_memory(config, machine)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # the server inherits it: no cached weights
        for name in STARTS:
            place = Path(folder) / name.replace(" ", "_")
            results[name] = _measure(config, plan, options, settings, place)
            print(f"{name}\n{table(results[name]['parts'])}")
            print(f"  peak during the start {results[name]['start_peak_bytes'] / MIB:.0f} MiB", flush=True)
    write_json(options.json, results)
    ratios = [figures["parts"]["total"]["ratio"] for figures in results.values()]
    return EXIT_FAILURES if max(ratios) > MOST else 0


def _measure(config: Config, plan: MemoryPlan, options: Any, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Starts a server and sends requests to it.

    Returns the parts of its memory at the peak under these requests, and its peak memory during the start, in bytes.
    """
    with (
        sampled(INTERVAL_S, usage_of_children) as samples,
        configured_server("memory", options.config, settings, folder, options.start_timeout) as server,
    ):
        usage_of_children()  # raises if the memory maps cannot be read
        at_start = max(each.total for each in samples)
        begin = len(samples)
        _load(server, config)
        _wait_until_settled(samples)
        metrics = fetch_metrics(server)
        peak = max(samples[begin:], key=lambda each: each.total)
    arrays = {
        WEIGHTS: _sum_of(metrics, "llm_serving_agent_weight_bytes"),
        KV_CACHE: _sum_of(metrics, "llm_serving_agent_kv_cache_bytes"),
    }
    return {"parts": parts_of(plan, peak, arrays), "start_peak_bytes": at_start}


def parts_of(plan: MemoryPlan, peak: Usage, arrays: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Returns the planned bytes, the bytes at the peak, and their ratio, for each part and for the total.

    ``arrays`` has the bytes of the agents' weights and of their KV caches, by name. All other memory of the agents is
    one further part.
    """
    planned = {name: plan.bytes_of(name) for name in arrays}
    planned[SERVER] = plan.bytes_of("server process")
    planned |= {REST: plan.total_bytes - sum(planned.values()), "total": plan.total_bytes}
    measured = {**arrays, REST: peak.agents - sum(arrays.values()), SERVER: peak.server, "total": peak.total}
    return {
        name: {"plan_bytes": planned[name], "peak_bytes": size, "ratio": size / planned[name]}
        for name, size in measured.items()
    }


def table(parts: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table with the planned memory, the measured peak and their ratio for each of ``parts``."""
    lines = [f"  {'':18}{'plan':>10}{'peak':>10}{'ratio':>8}"]
    for name, part in parts.items():
        plan, peak = part["plan_bytes"] / MIB, part["peak_bytes"] / MIB
        lines.append(f"  {name:18}{plan:6.0f} MiB{peak:6.0f} MiB{part['ratio']:8.2f}")
    return "\n".join(lines)


def prompts(config: Config) -> list[list[int]]:
    """Returns prompts of random tokens for as many requests as run together. The first one has the longest context."""
    draw = random.Random(0)
    lengths = [config.max_model_len - OUTPUT, *(SHORT_PROMPT for _ in range(config.max_num_seqs - 1))]
    return [[draw.randrange(FIRST_PLAIN_TOKEN, config.shape.vocab_size) for _ in range(length)] for length in lengths]


def _load(server: Endpoint, config: Config) -> None:
    """Sends all requests at the same time and waits for their responses.

    The requests sample with top_p, which needs more memory than argmax.
    """

    def send(prompt: list[int]) -> None:
        body = {"model": config.model_config.model_name, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True,
                "temperature": 1.0, "top_p": 0.9, "logprobs": 1}  # fmt: skip
        server.post("/v1/completions", body, REQUEST_TIMEOUT_S)

    requests = prompts(config)
    with client_threads(len(requests)) as pool:
        list(pool.map(send, requests))


def _wait_until_settled(samples: Sequence[Usage]) -> None:
    deadline, window = time.monotonic() + REQUEST_TIMEOUT_S, round(SETTLED_S / INTERVAL_S)
    seen = len(samples)
    while len(samples) < seen + window or samples[-1].total > samples[-window].total + SETTLED_BYTES:
        if time.monotonic() > deadline:
            raise LoadTestError(f"the memory still grew {REQUEST_TIMEOUT_S:g} s after the load")
        time.sleep(INTERVAL_S)


def _sum_of(metrics: Mapping[str, float], name: str) -> int:
    """Returns the sum of a metric over all agents. Raises LoadTestError if the server does not have the metric."""
    values = [value for key, value in metrics.items() if key.partition("{")[0] == name]
    if not values:
        raise LoadTestError(f"the server has no metric {name}, so the parts of its memory are not known")
    return int(sum(values))
