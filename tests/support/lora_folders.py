"""Writes folders of LoRA adapters as the library PEFT writes them, with random matrices."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from llm_serving.lora.targets import lora_targets
from llm_serving.model.shape import ModelShape

Tensors = dict[str, npt.NDArray[Any]]

ALL = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
    *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)


def adapter_tensors(
    shape: ModelShape, *, seed: int = 0, rank: int = 4, modules: Iterable[str] = ALL, size: float = 0.1
) -> Tensors:
    """Returns random matrices A and B for the layers whose names end with one of ``modules``, by their PEFT names."""
    random, ends, found = np.random.default_rng(seed), tuple(modules), {}
    for module, target in lora_targets(shape).items():
        if module.endswith(ends):
            name = f"base_model.model.{module}"
            a, b = random.standard_normal((rank, target.inputs)), random.standard_normal((target.outputs, rank))
            found[f"{name}.lora_A.weight"] = (a * size).astype(np.float32)
            found[f"{name}.lora_B.weight"] = (b * size).astype(np.float32)
    return found


def adapter_config(*, rank: int = 4, modules: Iterable[str] = ALL, **values: Any) -> dict[str, Any]:
    """Returns the content of an ``adapter_config.json``, with the keys that PEFT 0.17 writes."""
    usual: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "inference_mode": True,
        "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
        "target_modules": list(modules), "modules_to_save": None, "layers_to_transform": None, "lora_bias": False,
    }  # fmt: skip
    return {**usual, **values}


def write_adapter(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Writes an adapter's folder and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_adapter(
    folder: Path, shape: ModelShape, *, seed: int = 0, rank: int = 4, modules: Iterable[str] = ALL,
    size: float = 0.1, **values: Any,
) -> Path:  # fmt: skip
    """Writes an adapter with random matrices. ``values`` are further keys of its config."""
    names = tuple(modules)
    tensors = adapter_tensors(shape, seed=seed, rank=rank, modules=names, size=size)
    return write_adapter(folder, adapter_config(rank=rank, modules=names, **values), tensors)
