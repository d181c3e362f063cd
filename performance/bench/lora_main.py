"""Measures the time of steps without adapters, with one LoRA adapter, and with several adapters in each step.

One agent's model runs in this process, with random weights and random adapters for all linear layers. The three kinds
of steps alternate. The loss is the relative slowdown: the median of (time with adapters / time without adapters), minus
1.

    python performance/bench_lora.py
    python performance/bench_lora.py --config llama_tiny_cpu.yaml --rank 8 --rounds 5 --json FILE
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from agent.backends.runtime import start_runtime
from agent.model_runner import ModelRunner
from agent.warm_up import make_step
from agent.weights.storage import from_float32
from llm_serving.config import Config, load_config
from llm_serving.hub.fetching import cached_draft
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.shm import NO_ADAPTER, StepSlot
from llm_serving.lora.targets import lora_targets
from performance.program import exits_with_errors, new_parser, write_json
from performance.terminal import format_table

CONTEXT = 64
"""Tokens of the context of each sequence."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the times and the losses, and returns 0. Returns 2 if a config is wrong."""
    options = _parse(arguments)
    settings = [f"lora_config.max_adapters={options.adapters}", f"lora_config.max_rank={options.rank}"]
    settings = ["model_config.load_format=dummy", *settings, *options.set]
    config = load_config(options.config, settings, fetch=cached_draft)
    start_runtime(config, 0)
    runner = ModelRunner(config, lambda *_: None)
    runner.load()
    runner.compile()
    runner.warm_up()
    runner.later_pages.allocate_all()
    load_adapters(config, runner, options.adapters, options.rank)
    figures = {
        f"decode, {count} sequences": measure(runner, decode_step(config, count), options)
        for count in options.sequences
        if count <= config.max_num_seqs
    }
    tokens = min(options.prompt, config.max_num_batched_tokens, config.max_model_len)
    figures[f"prompt, {tokens} tokens"] = measure(runner, make_step(config, [tokens], [tokens]), options)
    rows = [
        [name, *(f"{each[kind]:.3f}" for kind in ("none_ms", "one_ms", "mixed_ms")),
         *(f"{100 * each[kind]:.1f} %" for kind in ("one_loss", "mixed_loss"))]
        for name, each in figures.items()
    ]  # fmt: skip
    several = f"{options.adapters} adapters"
    print(format_table(["step", "none ms", "one ms", f"{several} ms", "loss of one", f"loss of {several}"], rows))
    write_json(options.json, {"config": options.config, "rank": options.rank, "figures": figures})
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="llama_1b_cpu.yaml", help="config (default llama_1b_cpu.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting")
    parser.add_argument("--adapters", type=int, default=8, help="number of adapters (default 8)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default 16)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind (default 20)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the step with a prompt (default 256)")
    parser.add_argument(
        "--sequences", type=int, nargs="*", default=[1, 8], help="sequences of the decode steps (default 1 8)"
    )
    return parser.parse_args(arguments)


def load_adapters(config: Config, runner: ModelRunner, count: int, rank: int) -> None:
    """Loads random adapters of all linear layers into the adapter slots of a runner."""
    dtype, random = config.model_config.model_dtype, np.random.default_rng(0)
    for slot in range(count):
        modules: list[tuple[str, float, Any, Any]] = []
        for target in lora_targets(config.shape).values():
            a = random.standard_normal((rank, target.inputs), np.float32) * np.float32(0.02)
            b = random.standard_normal((target.outputs, rank), np.float32) * np.float32(0.02)
            modules.append((target.name, 1.0, from_float32(a, dtype), from_float32(b, dtype)))
        memory = AdapterMemory.create(modules)
        try:
            runner.load_adapter(slot, memory.name, memory.num_bytes)
        finally:
            memory.close()


def decode_step(config: Config, sequences: int) -> StepSlot:
    """Returns a decode step of ``sequences`` sequences, each with a context of ``CONTEXT`` tokens."""
    return make_step(config, [1] * sequences, [CONTEXT] * sequences)


def measure(runner: ModelRunner, slot: StepSlot, options: argparse.Namespace) -> dict[str, float]:
    """Returns the median times of the three kinds of steps, and the losses. The kinds alternate."""
    seqs = slot.num_seqs
    kinds: dict[str, Callable[[int], int]] = {
        "none": lambda index: NO_ADAPTER,
        "one": lambda index: 0,
        "mixed": lambda index: index % options.adapters,
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    is_decode = slot.num_tokens == seqs
    for number in range(options.rounds + 2):
        for kind, adapter_of in kinds.items():
            slot.adapters[:seqs] = [adapter_of(index) for index in range(seqs)]
            start = time.perf_counter()
            runner.run_step(slot, is_decode=is_decode)
            if number >= 2:  # the first steps warm up caches
                times[kind].append(time.perf_counter() - start)
    ratios = {kind: median(with_it / without for with_it, without in zip(times[kind], times["none"], strict=True))
              for kind in ("one", "mixed")}  # fmt: skip
    figures = {f"{kind}_ms": 1000 * median(each) for kind, each in times.items()}
    return figures | {f"{kind}_loss": ratio - 1 for kind, ratio in ratios.items()}
