"""The benchmark of agents that share a model; ``performance/bench_parallel.py`` runs it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent.kernels.collectives import exchange_times
from agent.model_runner import ModelRunner
from agent.warm_up import make_step
from llm_serving.config import Config, load_config
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.shm import LAST_TOKEN, StepSlot
from llm_serving.text_table import format_table

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ((1, 1), (2, 1), (1, 2))
BATCHES = (1, 8, 32)
CONTEXT = 128
STEPS = 40
TEXT_TOKENS = 32
PROMPT = tuple(range(11, 43))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; with ``--json`` also write the figures there."""
    parser = argparse.ArgumentParser(description="Decode steps of a model shared by several agents.")
    parser.add_argument("--config", default="llama_160m_cpu.yaml", help="default %(default)s")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--groups", default="", help="tensor x pipeline parallel, as 1x1,2x1 (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--agent", nargs=4, metavar=("RANK", "TP", "PP", "EXCHANGE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.agent is not None:
        rank, tp, pp, exchange = arguments.agent
        print(json.dumps(run_agent(arguments, int(rank), (int(tp), int(pp)), exchange)), flush=True)
        os._exit(0)
    groups = [tuple(map(int, each.split("x"))) for each in arguments.groups.split(",")] if arguments.groups else GROUPS
    figures = [measure(arguments, group) for group in groups]
    print(table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def config_of(arguments: argparse.Namespace, group: tuple[int, ...]) -> Config:
    """The config with the group's numbers."""
    parallel = [f"parallel_config.tensor_parallel={group[0]}", f"parallel_config.pipeline_parallel={group[1]}"]
    return load_config(arguments.config, [*arguments.overrides, *parallel])


def measure(arguments: argparse.Namespace, group: tuple[int, ...]) -> dict[str, Any]:
    """What the agent that answers measured, and the first one's share of communication."""
    config = config_of(arguments, group)
    exchange = None
    if config.parallel_config.group_size > 1:
        exchange = ExchangeMemory.create(layout_of(config))
    agents = []
    try:
        for rank in range(config.parallel_config.group_size):
            command = [sys.executable, str(ROOT / "performance" / "bench_parallel.py"), "--config", arguments.config]
            command += [part for override in arguments.overrides for part in ("--set", override)]
            command += ["--agent", str(rank), *map(str, group), exchange.name if exchange is not None else "none"]
            agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        outputs = [json.loads(agent.communicate(timeout=300)[0].splitlines()[-1]) for agent in agents]
    finally:
        if exchange is not None:
            exchange.close()
        for agent in agents:
            agent.kill()
            agent.wait()
    answering = outputs[(group[1] - 1) * group[0]]
    return {"group": list(group), **answering}


def layout_of(config: Config) -> ExchangeLayout:
    """Of the group's exchange."""
    return ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)


def run_agent(arguments: argparse.Namespace, rank: int, group: tuple[int, int], exchange_name: str) -> dict[str, Any]:
    """One agent: the same steps as the others."""
    config = config_of(arguments, group)
    exchange = None if exchange_name == "none" else ExchangeMemory.attach(exchange_name, layout_of(config))
    runner = ModelRunner(config, lambda *_: None, rank, exchange)
    runner.load()
    runner.compile()
    runner.warm_up()
    steps = {str(batch): decode_steps(runner, config, batch) for batch in BATCHES if batch <= config.max_decode_seqs}
    return {"text": generate(runner, config), "steps": steps, "threads": runner.summary()["cpu_threads"]}


def decode_steps(runner: ModelRunner, config: Config, batch: int) -> dict[str, float]:
    """Milliseconds of a step of ``batch`` sequences, and what share of it sums and gathers take."""
    context = min(CONTEXT, config.max_model_len)
    slot = make_step(config, [1] * batch, [context] * batch)
    width, blocks = config.max_blocks_per_seq, config.pa_config.num_blocks - 1
    slot.block_tables[: batch * width] = 1 + np.arange(batch * width) % blocks
    times, before = [], exchange_times()
    for _ in range(STEPS):
        start = time.perf_counter()
        runner.run_decode(slot)
        times.append(time.perf_counter() - start)
    after = exchange_times()
    total = sum(times) * 1e9
    return {
        "step_ms": 1000 * float(np.median(times)),
        "communication_share": (after.total_ns - before.total_ns) / total,
        "waiting_share": (after.waiting_ns - before.waiting_ns) / total,
    }


def generate(runner: ModelRunner, config: Config) -> list[int]:
    """Greedy tokens of one prompt."""
    runner.reset()
    size, tokens = len(PROMPT), []
    for step in range(TEXT_TOKENS):
        query = size if step == 0 else 1
        slot = make_step(config, [query], [size + step])
        width, block = config.max_blocks_per_seq, config.pa_config.block_size
        slot.block_tables[:width] = 1 + np.arange(width)
        slot.token_ids[:query] = PROMPT if step == 0 else LAST_TOKEN
        slot.sample_position[0] = step
        slot.slot_mapping[:query] = block + np.arange(size + step - query, size + step)
        run(runner, slot, decode=step > 0)
        tokens.append(int(slot.sampled_ids[0]))
    return tokens


def run(runner: ModelRunner, slot: StepSlot, *, decode: bool) -> None:
    """A prefill or a decode."""
    _ = runner.run_decode(slot) if decode else runner.run_prefill(slot)


def table(figures: Sequence[dict[str, Any]]) -> str:
    """For people."""
    header = ["agents", "threads each", "batch", "step ms", "in sums and gathers", "of it waiting", "same text"]
    rows = []
    for each in figures:
        tp, pp = each["group"]
        same = sum(a == b for a, b in zip(each["text"], figures[0]["text"], strict=True))
        for batch, step in each["steps"].items():
            rows.append(
                [
                    f"tp {tp} x pp {pp}",
                    str(each["threads"]),
                    batch,
                    f"{step['step_ms']:.2f}",
                    f"{100 * step['communication_share']:.1f} %",
                    f"{100 * step['waiting_share']:.1f} %",
                    f"{same}/{len(each['text'])}",
                ]
            )
    return format_table(header, rows)
