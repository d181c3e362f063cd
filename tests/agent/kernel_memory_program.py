"""Runs the steps that need the most kernel memory, and prints the kernels' memory and the memory plan as JSON.

python tests/agent/kernel_memory_program.py DTYPE OP_TABLE WEIGHT_FORMAT THREADS PARTS

PARTS is the name of a family of models, or ``adapters``: a dense model whose sequences have a LoRA adapter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from step_driver import Part, StepDriver  # noqa: E402

from agent.kernels import num_threads, recordings_bytes, scratch_bytes  # noqa: E402
from llm_serving.ipc.shm import NO_ADAPTER  # noqa: E402
from llm_serving.lora.loading import read_into_memory  # noqa: E402
from llm_serving.planning.machine import Machine  # noqa: E402
from llm_serving.planning.memory_plan import estimate_memory  # noqa: E402
from support.lora_folders import random_adapter  # noqa: E402
from support.model_folders import write_model_folder  # noqa: E402
from support.step_config import BLOCK_SIZE, make_config  # noqa: E402

TOKENS, LONGEST, SEQS, VOCABULARY = 1024, 2048, 8, 8000
BLOCKS = LONGEST // BLOCK_SIZE
RANK = 256
"""Rank of the adapter. With a large rank, the products with its matrices A are most of the scratch memory."""
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
SINKS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "head_dim": 64,
    "intermediate_size": 704,
    "attention_bias": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "swiglu_limit": 7.0,
}
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 512,
    "linear_value_head_dim": 512,
}
"""A small model with linear attention, whose heads have the largest size. So their buffers are most of the scratch
memory.
"""
LIMITS = {
    "model_config.load_format": "dummy",
    "model_config.max_generate_length": LONGEST,
    "model_config.seq_length": [LONGEST],
    "model_config.decode_batch_size": [SEQS],
    "pa_config.decode_seq_length": LONGEST,
    "pa_config.num_blocks": SEQS * BLOCKS + 1,
    "pa_config.num_host_blocks": 0,
    "scheduler_config.max_num_batched_tokens": TOKENS,
}
SHORT = 64
SMALL_LIMITS = LIMITS | {
    "model_config.max_generate_length": SHORT,
    "model_config.seq_length": [SHORT],
    "pa_config.decode_seq_length": SHORT,
    "scheduler_config.max_num_batched_tokens": SHORT,
}
"""Limits with which linear attention needs most of the scratch memory."""
ADAPTERS = {"lora_config.max_adapters": 1, "lora_config.max_rank": RANK}
SAMPLED = {"temperature": 1.0, "top_k": VOCABULARY - 1, "top_p": 0.9, "min_p": 1e-4, "repetition_penalty": 1.1}


def part(row: int, num_tokens: int, end: int, adapter: int = NO_ADAPTER) -> Part:
    """Returns a part that computes the last ``num_tokens`` tokens of a sequence of ``end`` tokens, and samples."""
    tokens = np.random.default_rng(row).integers(3, VOCABULARY, num_tokens).tolist()
    blocks = list(range(1 + row * BLOCKS, 1 + (row + 1) * BLOCKS))
    return Part(
        tokens, end - num_tokens, blocks, row=row, sampling=SAMPLED, history=tokens, history_prompt_len=num_tokens,
        adapter=adapter,
    )  # fmt: skip


def run_steps(driver: StepDriver, part: Callable[[int, int, int], Part] = part) -> None:
    driver.prefill(part(0, TOKENS, TOKENS))
    driver.prefill(*(part(row, TOKENS // 4, LONGEST) for row in range(4)))
    for num_tokens in (16, 64, 128, 192, 384, TOKENS):  # few rows, so that several threads share the keys of one
        # sequence
        driver.prefill(part(1, num_tokens, LONGEST))
    for seqs in range(1, SEQS + 1):
        for step in range(3):
            driver.decode(*(part(row, 1, LONGEST - 3 + step) for row in range(seqs)))


def run_adapted_steps(driver: StepDriver) -> None:
    """Runs steps whose sequences have an adapter of the largest rank."""
    _, memory = read_into_memory(random_adapter(Path("adapter"), driver.config.shape, rank=RANK), driver.config)
    driver.runner.load_adapter(0, memory.name, memory.num_bytes)
    memory.close()
    run_steps(driver, partial(part, adapter=0))


def short_part(row: int, num_tokens: int, end: int) -> Part:
    """Returns a part like ``part``, for a model with ``SMALL_LIMITS``."""
    long = part(row, num_tokens, end)
    return replace(long, blocks=long.blocks[: SHORT // BLOCK_SIZE])


def run_hybrid_steps(driver: StepDriver) -> None:
    """Runs steps that begin each sequence with its first token, because linear attention needs the state before."""
    driver.prefill(short_part(0, SHORT, SHORT))
    driver.prefill(*(short_part(row, SHORT // 4, SHORT // 4) for row in range(4)))
    for step in range(1, 4):
        driver.decode(*(short_part(row, 1, SHORT // 4 + step) for row in range(4)))


def main() -> None:
    dtype, op_table, weights, threads, experts = sys.argv[1:]
    families = {"experts": EXPERTS, "latent": LATENT, "sinks": SINKS, "hybrid": HYBRID}
    parts = families.get(experts, {})
    cache = "int8" if experts == "int8 cache" else "auto"
    folder = write_model_folder(Path("model"), **{**SIZES, **parts})
    limits = {"hybrid": SMALL_LIMITS, "adapters": LIMITS | ADAPTERS}.get(experts, LIMITS)
    config = make_config(folder, dtype, op_table, weights, cache, extra={**limits, "model_config.cpu_threads": threads})
    {"hybrid": run_hybrid_steps, "adapters": run_adapted_steps}.get(experts, run_steps)(StepDriver(config))
    assert num_threads() == int(threads)
    plan = estimate_memory(config, Machine(1 << 40, "a test", num_cores=1))
    names = ("kernel scratch", "activations", "replays")
    held = (scratch_bytes(between_operators=False), scratch_bytes(between_operators=True), recordings_bytes())
    print(json.dumps({name: [num_bytes, plan.bytes_of(name)] for name, num_bytes in zip(names, held, strict=True)}))


if __name__ == "__main__":
    main()
