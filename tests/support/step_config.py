"""Makes a small config for tests that use a ModelRunner without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_serving.config import Config, load_config

BLOCK_SIZE = 16
NUM_BLOCKS = 256
NUM_HOST_BLOCKS = 12
MAX_MODEL_LEN = 256
PREFILL_SEQS = 4
DECODE_SEQS = 8


def make_config(
    folder: Path,
    dtype: str,
    op_table: str,
    weights: str = "auto",
    kv: str = "auto",
    extra: dict[str, Any] | None = None,
) -> Config:
    """Returns a config with small limits, for a model that runs on one thread."""
    overrides = {
        "model_config.model_path": folder,
        "model_config.model_dtype": dtype,
        "model_config.op_table": op_table,
        "model_config.weight_format": weights,
        "model_config.weight_group": 32,
        "model_config.kv_format": kv,
        "model_config.device_target": "CPU",
        "model_config.cpu_threads": 1,
        **limits(),
        **(extra or {}),
    }
    return load_config("llama_tiny_cpu.yaml", [f"{key}={value}" for key, value in overrides.items()])


def limits() -> dict[str, Any]:
    """Returns overrides with small limits for the lengths of sequences, the batch and the KV cache."""
    return {
        "model_config.max_generate_length": MAX_MODEL_LEN,
        "model_config.seq_length": [MAX_MODEL_LEN],
        "model_config.prefill_batch_size": [PREFILL_SEQS],
        "model_config.decode_batch_size": [DECODE_SEQS],
        "pa_config.num_blocks": NUM_BLOCKS,
        "pa_config.num_host_blocks": NUM_HOST_BLOCKS,
        "pa_config.block_size": BLOCK_SIZE,
        "scheduler_config.max_num_batched_tokens": MAX_MODEL_LEN,
    }
