"""Measures decode steps of a model on one agent and on several agents that share it, without a server.

A row has the median time of a step for one group of agents, and two fractions of this time. The agent that returns the
tokens measures them. The first fraction is the time in which agents add and gather arrays. The second fraction is the
part of that time in which the agent waits for other agents. The program also generates --texts greedy texts with each
group, and compares them with the texts of the first group. The result shows how many texts are equal, and by how much
logits differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
from llm_serving.hub.fetching import cached_draft
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.shm import LAST_TOKEN
from performance.program import new_parser, write_json
from performance.terminal import format_table

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ((1, 1), (2, 1), (1, 2))
BATCHES = (1, 8, 32)
CONTEXT = 128
"""Tokens of the context of each sequence."""
STEPS = 40
"""Number of decode steps of a measurement."""
PROMPT_TOKENS, TEXT_TOKENS = 32, 64
"""Number of tokens of each prompt, and of each generated text that is compared between groups."""
FIRST_PLAIN_TOKEN = 10
"""Prompts have tokens from this id on. The smaller ids are special tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the times of all groups and optionally writes them to a file. Returns the exit code."""
    parser = new_parser(__doc__, "llama_160m_cpu.yaml")
    parser.add_argument("--groups", default="", help="tensor x pipeline parallel, such as 1x1,2x1")
    parser.add_argument("--texts", type=int, default=1, help="number of compared texts (default %(default)s)")
    parser.add_argument("--agent", nargs=4, metavar=("RANK", "TP", "PP", "EXCHANGE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.agent is not None:
        rank, tp, pp, exchange = arguments.agent
        print(json.dumps(run_agent(arguments, int(rank), (int(tp), int(pp)), exchange)), flush=True)
        os._exit(0)
    groups = [tuple(map(int, each.split("x"))) for each in arguments.groups.split(",")] if arguments.groups else GROUPS
    figures = [measure(arguments, group) for group in groups]
    print(table(figures))
    for each in figures[1:]:
        print(comparison(figures[0], each))
    write_json(arguments.json, figures)
    return 0


def config_of(arguments: argparse.Namespace, group: tuple[int, ...]) -> Config:
    """Returns the config of a group: ``group`` is (tensor_parallel, pipeline_parallel)."""
    parallel = [f"parallel_config.tensor_parallel={group[0]}", f"parallel_config.pipeline_parallel={group[1]}"]
    if group[0] > 1:
        parallel.append("parallel_config.sum_parts=1")  # sum_parts is only allowed if tensor_parallel is 1
    return load_config(arguments.config, [*arguments.settings, *parallel], fetch=cached_draft)


def measure(arguments: argparse.Namespace, group: tuple[int, ...]) -> dict[str, Any]:
    """Runs the agents of one group. Returns the measurements of the agent that samples, which is the first agent of the
    last stage.
    """
    config = config_of(arguments, group)
    exchange = None
    if config.parallel_config.group_size > 1:
        exchange = ExchangeMemory.create(layout_of(config))
    agents = []
    try:
        for rank in range(config.parallel_config.group_size):
            command = [sys.executable, str(ROOT / "performance" / "bench_parallel.py"), "--config", arguments.config]
            command += ["--texts", str(arguments.texts)]
            command += [part for override in arguments.settings for part in ("--set", override)]
            command += ["--agent", str(rank), *map(str, group), exchange.name if exchange is not None else "none"]
            agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        outputs = [json.loads(agent.communicate(timeout=300)[0].splitlines()[-1]) for agent in agents]
    finally:
        if exchange is not None:
            exchange.close()
        for agent in agents:
            agent.kill()
            agent.wait()
    responding = outputs[(group[1] - 1) * group[0]]
    return {"group": list(group), **responding}


def layout_of(config: Config) -> ExchangeLayout:
    """Returns the layout of the shared memory through which the agents of a group exchange data."""
    return ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)


def run_agent(arguments: argparse.Namespace, rank: int, group: tuple[int, int], exchange_name: str) -> dict[str, Any]:
    """Runs one agent of a group in this process. All agents of a group run the same steps."""
    config = config_of(arguments, group)
    exchange = None if exchange_name == "none" else ExchangeMemory.attach(exchange_name, layout_of(config))
    runner = ModelRunner(config, lambda *_: None, rank, exchange)
    runner.load()
    runner.compile()
    runner.warm_up()
    runner.later_pages.allocate_all()
    steps = {str(batch): decode_steps(runner, config, batch) for batch in BATCHES if batch <= config.max_decode_seqs}
    texts = [generate(runner, config, number) for number in range(arguments.texts)]
    return {"texts": texts, "steps": steps, "threads": runner.summary()["cpu_threads"]}


def decode_steps(runner: ModelRunner, config: Config, batch: int) -> dict[str, float]:
    """Measures decode steps of ``batch`` sequences.

    Returns the median time, and the fractions of the time that are spent in communication and in waiting.
    """
    context = min(CONTEXT, config.max_model_len)
    slot = make_step(config, [1] * batch, [context] * batch)
    width, blocks = config.max_blocks_per_seq, config.pa_config.num_blocks - 1
    slot.block_tables[: batch * width] = 1 + np.arange(batch * width) % blocks
    times, before = [], exchange_times()
    for _ in range(STEPS):
        start = time.perf_counter()
        runner.run_step(slot, is_decode=True)
        times.append(time.perf_counter() - start)
    after = exchange_times()
    total = sum(times) * 1e9
    return {
        "step_ms": 1000 * float(np.median(times)),
        "communication_share": (after.total_ns - before.total_ns) / total,
        "waiting_share": (after.waiting_ns - before.waiting_ns) / total,
    }


def generate(runner: ModelRunner, config: Config, number: int) -> dict[str, list[Any]]:
    """Returns greedy tokens for the seeded prompt ``number``, with the two largest logits at each token."""
    generator = random.Random(f"parallel/{number}")
    prompt = [generator.randrange(FIRST_PLAIN_TOKEN, config.shape.vocab_size) for _ in range(PROMPT_TOKENS)]
    runner.reset()
    tokens, logits = [], []
    for step in range(TEXT_TOKENS):
        query = PROMPT_TOKENS if step == 0 else 1
        slot = make_step(config, [query], [PROMPT_TOKENS + step])
        width, block = config.max_blocks_per_seq, config.pa_config.block_size
        slot.block_tables[:width] = 1 + np.arange(width)
        slot.token_ids[:query] = prompt if step == 0 else LAST_TOKEN
        slot.sample_position[0] = step
        slot.num_top_logits[0] = 2
        slot.slot_mapping[:query] = block + np.arange(PROMPT_TOKENS + step - query, PROMPT_TOKENS + step)
        runner.run_step(slot, is_decode=step > 0)
        tokens.append(int(slot.sampled_ids[0]))
        logits.append(slot.top_logits[:2].tolist())
    return {"tokens": tokens, "logits": logits}


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Returns the times of all groups as a table."""
    header = ["agents", "threads each", "batch", "step ms", "in sums and gathers", "waiting in them", "same texts"]
    rows = []
    for each in figures:
        tp, pp = each["group"]
        same = sum(first_difference(*both) is None for both in zip(figures[0]["texts"], each["texts"], strict=True))
        for batch, step in each["steps"].items():
            rows.append(
                [
                    f"tp {tp} x pp {pp}",
                    str(each["threads"]),
                    batch,
                    f"{step['step_ms']:.2f}",
                    f"{100 * step['communication_share']:.1f} %",
                    f"{100 * step['waiting_share']:.1f} %",
                    f"{same}/{len(each['texts'])}",
                ]
            )
    return format_table(header, rows)


def first_difference(text: dict[str, list[Any]], other: dict[str, list[Any]]) -> int | None:
    """Returns the position of the first token that differs between two texts, or None."""
    pairs = zip(text["tokens"], other["tokens"], strict=True)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), None)


def comparison(one: dict[str, Any], several: dict[str, Any]) -> str:
    """Compares texts and largest logits of two groups, up to the first different token of each text."""
    rows, bits, largest = [], 0, 0.0
    for number, (text, other) in enumerate(zip(one["texts"], several["texts"], strict=True)):
        position = first_difference(text, other)
        end = TEXT_TOKENS if position is None else position + 1
        logits, others = np.array(text["logits"][:end]), np.array(other["logits"][:end])
        bits += int(position is None and np.array_equal(logits, others))
        largest = max(largest, float(np.abs(logits - others).max()))
        if position is not None:
            best, second = logits[position]
            rows.append([str(number), str(position), f"{best - second:.5f}", f"{best:.5f}"])
    summary = f"tp {several['group'][0]} x pp {several['group'][1]}: {bits} texts with the same logits to the bit, "
    summary += f"the largest difference of one {largest:.5f}"
    header = ["text", "first different token", "lead of its logit", "logit"]
    return "\n".join([summary, format_table(header, rows)] if rows else [summary])
