"""Forms and metadata of GGUF files of DeepSeek and of Qwen's hybrids, as llama.cpp's converters write them.

The converters are ``conversion/deepseek.py`` and ``conversion/qwen.py`` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
Tensors = dict[str, np.ndarray]


def has_larger_norm(name: str, tensor: str) -> bool:
    """Returns whether the converter of the architecture ``name`` adds 1 to a tensor."""
    is_norm = tensor.endswith("norm.weight") and not tensor.endswith("linear_attn.norm.weight")
    return is_norm and name in ("gemma3", *HYBRIDS)


def other_form(name: str, config: dict[str, Any], tensor: str) -> Callable[[np.ndarray], Tensors] | None:
    """Returns the function that converts a Hugging Face tensor to the tensors of a GGUF file, or None for the usual
    form.

    The function only changes the order of values. The caller converts the values of ``A_log`` afterwards.
    """
    layer = re.match(r"model\.layers\.(\d+)\.(self_attn|linear_attn)\.(.+)", tensor)
    if layer is None:
        return None
    block = f"blk.{layer[1]}."
    if tensor.endswith("kv_b_proj.weight"):
        return (lambda values: _split_heads(values, config, block)) if is_split(config) else None
    if layer[2] != "linear_attn":
        return None
    if layer[3] == "in_proj_qkvz.weight":
        return lambda values: _ungrouped(values, config, block)
    kind = layer[3]
    return lambda values: _tiled(values, config, block, kind) if kind in _DELTA_NAMES else {}


def is_split(config: dict[str, Any]) -> bool:
    """Returns whether the file has separate tensors for the keys and the values of latent attention, as from newer
    converters.
    """
    return config["architectures"] == ["DeepseekV3ForCausalLM"]


def _split_heads(values: np.ndarray, config: dict[str, Any], block: str) -> Tensors:
    heads, key = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = values.reshape(heads, -1, values.shape[1])
    return {f"{block}attn_k_b.weight": both[:, :key].transpose(0, 2, 1), f"{block}attn_v_b.weight": both[:, key:]}


def _ungrouped(values: np.ndarray, config: dict[str, Any], block: str) -> Tensors:
    """Returns all queries, keys and values, and the output gates, from rows that are grouped by key head."""
    heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    grouped = values.reshape(heads, -1, values.shape[1])
    parts = np.split(grouped, [key, 2 * key, 2 * key + value], axis=1)
    query, keys, inner, gates = (part.reshape(-1, values.shape[1]) for part in parts)
    return {f"{block}attn_qkv.weight": np.concatenate([query, keys, inner]), f"{block}attn_gate.weight": gates}


_DELTA_NAMES = {
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def _tiled(values: np.ndarray, config: dict[str, Any], block: str, kind: str) -> Tensors:
    """Returns a tensor of linear attention in the file's order of heads. In Qwen3.5, neighbouring value heads have
    different key heads.
    """
    values = values.squeeze()
    if config["architectures"] != ["Qwen3NextForCausalLM"]:
        keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        if kind in ("conv1d.weight", "in_proj_qkv.weight"):
            values = np.concatenate([values[:keys], _reordered(values[keys:], config)])
        elif kind == "out_proj.weight":
            values = _reordered(values.T, config).T
        elif kind != "norm.weight":
            values = _reordered(values, config)
    return {block + _DELTA_NAMES[kind]: values}


def _reordered(values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    heads, all_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    by_head = values.reshape(heads, all_heads // heads, len(values) // all_heads, *values.shape[1:])
    return by_head.swapaxes(0, 1).reshape(values.shape)


def write_deepseek2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the metadata keys of DeepSeek. Older converters write no groups of experts, and use other keys for the
    head sizes.
    """
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    is_v3 = is_split(config)
    writer.add_head_count_kv(1 if is_v3 else config["num_attention_heads"])
    writer.add_key_length(rank + rotated if is_v3 else key)
    writer.add_value_length(rank if is_v3 else value)
    if is_v3:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_rope_dimension_count(rotated)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config.get("routed_scaling_factor", 1.0))
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def write_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the metadata keys of Gated DeltaNet and of Qwen's experts."""
    rotated = config.get("partial_rotary_factor", config.get("rope_parameters", {}).get("partial_rotary_factor"))
    writer.add_rope_dimension_count(int(config["head_dim"] * rotated))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["full_attention_interval"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
