"""Converts seeded model folders to GGUF files as llama.cpp does, with the writer of the ``gguf`` library."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from performance.models.variants import FAMILY_VARIANTS, Variant

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}


def _without(name: str, *keys: str) -> Variant:
    """Returns the seeded model ``name`` in float32, without the given keys of its ``config.json``.

    A GGUF file cannot state these keys.
    """
    variant = FAMILY_VARIANTS[name]
    config = {key: value for key, value in variant.config.items() if key not in keys}
    return replace(variant, dtype="float32", config=config)


GGUF_FAMILIES = {
    "llama": _without("llama_linear_mqa"),
    "mixtral": _without("mixtral", "sliding_window"),
    "qwen2": _without("qwen2_tied"),
    "qwen3": _without("qwen3_tied"),
    "qwen3moe": _without("qwen3_moe", "mlp_only_layers"),
}
"""A seeded model of each architecture that is read from GGUF files."""


def write_gguf_model(folder: Path, path: Path, kind: str = "F32") -> None:
    """Writes the model of a Hugging Face folder as one GGUF file, with matrices of type ``kind`` and no tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    name = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), name)
    _write_metadata(writer, name, config)
    numbers = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[name], config["num_hidden_layers"])
    for tensor, values in _joined_experts(folder):
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if name == "llama" and (heads := _heads(tensor, config)):
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        assert found is not None, tensor
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(found, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, name: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.get("rope_type", scaling.get("type"))))
        writer.add_rope_scaling_factor(scaling["factor"])
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if name == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _joined_experts(folder: Path) -> list[tuple[str, np.ndarray]]:
    """Returns the tensors of the folder as float32. The matrices of a layer's experts are stacked to one tensor."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                found[name] = opened.get_tensor(name)
    joined: dict[str, dict[int, np.ndarray]] = {}
    for name in sorted(found):
        if match := re.search(r"\.experts\.(\d+)\.", name):
            whole = name.replace(match[0], ".experts.")
            joined.setdefault(whole, {})[int(match[1])] = found.pop(name)
    stacked = {name: np.stack([each[index] for index in sorted(each)]) for name, each in joined.items()}
    return sorted({**found, **stacked}.items())


def _heads(name: str, config: dict[str, Any]) -> int | None:
    """Returns the number of heads of a query or key weight, because llama.cpp changes the order of its rows.

    Returns None for all other tensors.
    """
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None
