"""Writes seeded models with a LoRA adapter, and the same models with the adapter merged into their weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from performance.models.folders import write_safetensors
from performance.models.variants import Variant

ADAPTERS = {"lora_config.max_adapters": 2, "lora_config.max_rank": 8}
ADAPTER = "adapter"
"""Folder of the adapter in a model's folder."""
SCALE = 2.0


def merge(folder: Path, adapter: Path) -> None:
    """Adds the adapter to the weights of a float32 folder, as PEFT's ``merge_and_unload`` does: W + scale x B x A."""
    weights, matrices = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if name.endswith(".lora_A.weight"):
            tensor = name.removeprefix("base_model.model.").replace(".lora_A", "")
            b = matrices[name.replace("lora_A", "lora_B")]
            change = SCALE * (b.astype(np.float64) @ a.astype(np.float64))
            weights[tensor] = (weights[tensor] + change).astype(np.float32)
    write_safetensors(folder / "model.safetensors", weights)


def prompts_of(variant: Variant) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(7).integers(3, variant.config["vocab_size"], (2, 60)).tolist()
    return found
