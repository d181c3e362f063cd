"""Converts seeded model folders to GGUF files as llama.cpp does, with the writer of the ``gguf`` library."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from performance.models.variants import FAMILY_VARIANTS, Variant
from support.gguf_forms import HYBRIDS, Tensors, has_larger_norm, other_form, write_deepseek2, write_hybrid

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Phi3ForCausalLM": "phi3",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt-oss",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}


def _without(name: str, *keys: str) -> Variant:
    """Returns the seeded model ``name`` in float32, without the given keys of its ``config.json``.

    A GGUF file cannot state these keys.
    """
    variant = FAMILY_VARIANTS[name]
    config = {key: value for key, value in variant.config.items() if key not in keys}
    return replace(variant, dtype="float32", config=config)


UNQUANTISED = ("ffn_gate_inp", "ssm_conv1d")
"""Parts of the names of matrices that llama.cpp never quantises: routers and convolutions."""
RANDOM_BLOCKS = {
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 1.0},
}
"""For each type: maps the byte positions of the float16 factors in a block to their values, in units of the block's
scale. The second factor scales the minima, so that the mean of the random values is near 0.
"""


def _with(variant: Variant, **changes: Any) -> Variant:
    return replace(variant, config={**variant.config, **changes})


_ALTERNATE = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
}
GGUF_FAMILIES = {
    "llama": _without("llama_linear_mqa"),
    "mixtral": _without("mixtral", "sliding_window"),
    "qwen2": _without("qwen2_tied"),
    "qwen3": _without("qwen3_tied"),
    "qwen3moe": _without("qwen3_moe", "mlp_only_layers"),
    "gemma3": _with(_without("gemma3", "layer_types"), query_pre_attn_scalar=32, num_hidden_layers=6),
    "gpt-oss": _with(_without("gpt_oss"), layer_types=None, num_hidden_layers=4),
    "phi3": _without("phi4_mini"),  # its rotary divisors are float32 numbers, as in a GGUF file
    "deepseek2-lite": _without("deepseek_v2_lite"),
    "deepseek2": _without("deepseek_v3"),
    "qwen3next": _with(_without("qwen3_next", "mlp_only_layers"), **_ALTERNATE),
    "qwen35": _with(_without("qwen3_5"), linear_num_value_heads=4, **_ALTERNATE),
    "qwen35moe": _with(_without("qwen3_5_moe", "intermediate_size"), **_ALTERNATE),
}
"""A seeded model of each architecture that is read from GGUF files."""


_WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


def _wide(variant: Variant) -> Variant:
    """Returns a variant whose rows are whole blocks of 256 values, which the K types need."""
    config = variant.config
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    sizes = {"num_attention_heads": 256 // head_dim}
    if "kv_lora_rank" in config:
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 32, "kv_lora_rank": 256}
        sizes |= {"q_lora_rank": 256} if config["q_lora_rank"] else {}
    if "linear_value_head_dim" in config:
        sizes |= {"linear_value_head_dim": 256 // config["linear_num_value_heads"]}
    if "shared_expert_intermediate_size" in config:
        sizes["shared_expert_intermediate_size"] = 256
    if "moe_intermediate_size" in config:
        sizes["moe_intermediate_size"] = 256
    sizes |= {key: size for key, size in _WIDE.items() if key in config}
    return replace(variant, config={**config, **sizes}, num_shards=1)


WIDE_FAMILIES = {name: _wide(variant) for name, variant in GGUF_FAMILIES.items()}
"""The models of ``GGUF_FAMILIES`` with rows of 256 values."""


def write_gguf_model(folder: Path, path: Path, kind: str = "F32") -> dict[str, np.ndarray]:
    """Writes the model of a Hugging Face folder as one GGUF file, with matrices of type ``kind`` and no tokenizer.

    As in llama.cpp, vectors and routers of experts stay F32. Returns the values that the file stores, as float32 by
    Hugging Face's names; the experts of a layer are one array. The ``gguf`` library dequantizes them.
    """
    config = json.loads((folder / "config.json").read_text())
    name = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), name)
    _write_metadata(writer, name, config)
    numbers = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[name], config["num_hidden_layers"])
    stored_values: dict[str, np.ndarray] = {}
    for tensor, values in _joined_experts(folder, gate_first=name == "qwen35moe"):
        if (form := other_form(name, config, tensor)) is not None:
            stored_values[tensor] = _write_other_form(writer, tensor, values, form, kind)
            continue
        if tensor.endswith(".e_score_correction_bias"):
            found = names.get_name(tensor.replace("_bias", ".bias"), try_suffixes=(".bias",))
        else:
            found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert found is not None, tensor
        found += ".weight" if tensor.endswith(".sinks") else ""
        stored = _stored_type(found, values, kind)
        one = np.float32(has_larger_norm(name, tensor))  # llama.cpp's converter adds 1
        data = encode(values + one, stored)
        stored_values[tensor] = gguf.dequantize(data, stored).reshape(values.shape) - one
        if name == "llama" and (heads := _heads(tensor, config)):
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(found, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored_values


def _write_other_form(
    writer: gguf.GGUFWriter, tensor: str, values: np.ndarray, form: Callable[[np.ndarray], Tensors], kind: str
) -> np.ndarray:
    """Writes the tensors that a converter makes from the tensor ``values``. Returns the stored values, in the order of
    ``values``.

    The converter's function ``form`` is also applied to an array of indexes. The result is the index of each stored
    value.
    """
    places, stored_values = form(np.arange(values.size).reshape(values.shape)), np.empty(values.shape, np.float32)
    for name, moved in form(values).items():
        moved = -np.exp(moved) if name.endswith("ssm_a") else moved
        stored = _stored_type(name, moved, kind)
        data = encode(np.ascontiguousarray(moved), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
        read = gguf.dequantize(data, stored).reshape(moved.shape)
        stored_values.flat[places[name]] = np.log(-read.astype(np.float64)) if name.endswith("ssm_a") else read
    return stored_values


def _stored_type(name: str, values: np.ndarray, kind: str) -> gguf.GGMLQuantizationType:
    """Returns the type of a tensor. As in llama.cpp, rows that are no whole blocks of ``kind`` get another type."""
    if values.ndim < 2 or name.endswith(".bias") or any(part in name for part in UNQUANTISED):
        kind = "F32"
    wanted = gguf.GGMLQuantizationType[kind]
    fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if fits else gguf.GGMLQuantizationType["Q8_0" if values.shape[-1] % 32 == 0 else "F32"]


def encode(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Returns ``values`` as blocks of a GGUF type.

    For the types that the ``gguf`` library cannot write, returns random blocks instead. Their factors have random
    signs, so that the values have mean 0. The standard deviation is that of ``values``.
    """
    if kind.name not in RANDOM_BLOCKS:
        return gguf.quantize(values, kind)
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(np.abs(values).sum() * 1000) % 2**32)
    data = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // size, block_bytes), dtype=np.uint8)
    signs = random.choice(np.array([-1, 1], np.float32), data.shape[:-1])
    _set_factors(data, kind.name, signs)
    spread = gguf.dequantize(data.reshape(*values.shape[:-1], -1), kind).std()
    _set_factors(data, kind.name, signs * values.std() / spread)
    return data.reshape(*values.shape[:-1], -1)


def _set_factors(data: np.ndarray, kind: str, scales: np.ndarray) -> None:
    """Writes the float16 factors of all blocks. ``data`` are the blocks, ``scales`` the first factor of each block."""
    for place, factor in RANDOM_BLOCKS[kind].items():
        data[..., place : place + 2] = (scales * factor).astype(np.float16)[..., None].view(np.uint8)


def _write_metadata(writer: gguf.GGUFWriter, name: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if name != "deepseek2":
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if name == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if name == "deepseek2":
        write_deepseek2(writer, config)
    if name in HYBRIDS:
        write_hybrid(writer, config)
    if name == "phi3":
        _write_phi3(writer, config)
    elif scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.get("rope_type", scaling.get("type"))))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if name == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _write_phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the metadata keys and tensors of partial rotary embedding and of LongRoPE, as llama.cpp's converter does.
    """
    scaling, trained = config["rope_scaling"], config["original_max_position_embeddings"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * config["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(trained)
    stretch = config["max_position_embeddings"] / trained
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(trained)))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(scaling[f"{kind}_factor"], np.float32))


def _joined_experts(folder: Path, *, gate_first: bool) -> list[tuple[str, np.ndarray]]:
    """Returns the tensors of the folder as float32. The matrices of a layer's experts are stacked to one tensor."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                found |= _separated(name, opened.get_tensor(name), gate_first=gate_first)
    joined: dict[str, dict[int, np.ndarray]] = {}
    for name in sorted(found):
        if match := re.search(r"\.experts\.(\d+)\.", name):
            whole = name.replace(match[0], ".experts.")
            joined.setdefault(whole, {})[int(match[1])] = found.pop(name)
    stacked = {name: np.stack([each[index] for index in sorted(each)]) for name, each in joined.items()}
    return sorted({**found, **stacked}.items())


def _separated(name: str, values: np.ndarray, *, gate_first: bool) -> dict[str, np.ndarray]:
    """Returns a tensor of all experts as llama.cpp's converter stores it, or another tensor unchanged.

    Gate and up are separate, and matrices are [experts, out, in]. ``gate_first`` is the order of Qwen3.5, in which all
    gates come before all ups. In gpt-oss they alternate, and the inputs come before the outputs.
    """
    if ".experts." not in name or "_proj" not in name or re.search(r"\.experts\.\d", name):
        return {name: values}
    if gate_first:
        place, _, matrix = name.rpartition(".")
        if matrix == "down_proj":
            return {f"{name}.weight": values}
        gate, up = np.split(values, 2, axis=1)
        return {f"{place}.gate_proj.weight": gate, f"{place}.up_proj.weight": up}
    end = ".bias" if name.endswith("_bias") else ".weight"
    stem, values = name.removesuffix("_bias"), values if end == ".bias" else values.swapaxes(1, 2)
    if not stem.endswith("gate_up_proj"):
        return {stem + end: values}
    place = stem.removesuffix("gate_up_proj")
    return {f"{place}gate_proj{end}": values[:, ::2], f"{place}up_proj{end}": values[:, 1::2]}


def _heads(name: str, config: dict[str, Any]) -> int | None:
    """Returns the number of heads of a query or key weight, because llama.cpp changes the order of its rows.

    Returns None for all other tensors.
    """
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None
