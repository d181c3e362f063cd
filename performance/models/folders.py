"""Writes models with seeded random weights as Hugging Face folders, the same on every machine.

    python -m performance.models.folders gqa_tied /tmp/gqa_tied

Tests create these folders when they need them, so the weights are not stored in the repository.
``agent.weights.seeded`` documents the generator of the weights. Each kind of tensor has its own standard deviation. The
standard deviations are chosen so that the decoder layers influence the result more than the embedding does. As a result
the generated text depends on its context, the tokens vary, and the best logit is clearly above the second.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file

from agent.weights.seeded import fill_seeded
from agent.weights.storage import Array, allocate, from_float32, to_float32
from llm_serving.model.mxfp4 import MXFP4_GROUP
from performance.models.variants import VARIANTS, Variant

_RESULT_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
"""Gemma's norms whose results are added to the residual stream. The weights of these norms are large, as in trained
models. With small weights, the large embeddings alone would decide the text.
"""
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""The ``model_type`` of models with linear attention in most layers. Most of their norms multiply by 1 + weight."""
_SPREAD_NORMS = ("q_norm.weight", "k_norm.weight", "q_a_layernorm.weight", "kv_a_layernorm.weight")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the model that ``config`` describes, by its Hugging Face name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        if (config.get("layer_types") or {index: ""})[index] == "linear_attention":
            shapes |= _delta_shapes(config, f"{layer}.linear_attn")
        else:
            shapes |= _attention_shapes(config, f"{layer}.self_attn")
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.get("model_type") == "gemma3_text":
            shapes[f"{layer}.pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[f"{layer}.post_feedforward_layernorm.weight"] = (hidden,)
        if config.get("model_type") == "mixtral":
            shapes |= _mixtral_shapes(config, f"{layer}.block_sparse_moe")
        else:
            shapes |= _mlp_shapes(config, index, f"{layer}.mlp")
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _attention_shapes(config: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    if config.get("model_type", "").startswith("deepseek"):
        return _latent_shapes(config, name)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    if config.get("model_type") == "phi3":
        return {f"{name}.qkv_proj.weight": (query + 2 * key, hidden), f"{name}.o_proj.weight": (hidden, query)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.q_proj.weight": (query, hidden),
        f"{name}.k_proj.weight": (key, hidden),
        f"{name}.v_proj.weight": (key, hidden),
        f"{name}.o_proj.weight": (hidden, query),
    }
    if config.get("model_type") in HYBRIDS:  # each query head has rows for the query and for its gate
        shapes[f"{name}.q_proj.weight"] = (2 * query, hidden)
    model_type, all_biased = config.get("model_type", "llama"), config.get("attention_bias", False)
    if all_biased or model_type == "qwen2":
        shapes |= {f"{name}.q_proj.bias": (query,), f"{name}.k_proj.bias": (key,), f"{name}.v_proj.bias": (key,)}
    if all_biased and model_type != "qwen2":
        shapes[f"{name}.o_proj.bias"] = (hidden,)
    if model_type == "gpt_oss":
        shapes[f"{name}.sinks"] = (heads,)
    if model_type.startswith(("qwen3", "gemma3")):
        shapes |= {f"{name}.q_norm.weight": (head_dim,), f"{name}.k_norm.weight": (head_dim,)}
    return shapes


def _delta_shapes(config: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a layer with Gated DeltaNet."""
    hidden, heads, value_heads = (
        config[key] for key in ("hidden_size", "linear_num_key_heads", "linear_num_value_heads")
    )
    keys, values = heads * config["linear_key_head_dim"], value_heads * config["linear_value_head_dim"]
    sizes = {"qkvz": 2 * keys + 2 * values, "ba": 2 * value_heads}
    if config["model_type"] != "qwen3_next":
        sizes = {"qkv": 2 * keys + values, "z": values, "b": value_heads, "a": value_heads}
    return {
        f"{name}.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        **{f"{name}.in_proj_{part}.weight": (size, hidden) for part, size in sizes.items()},
        f"{name}.dt_bias": (value_heads,),
        f"{name}.A_log": (value_heads,),
        f"{name}.norm.weight": (config["linear_value_head_dim"],),
        f"{name}.out_proj.weight": (hidden, values),
    }


def _latent_shapes(config: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank, rope = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope, value, query_rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        f"{name}.kv_a_layernorm.weight": (rank,),
        f"{name}.kv_b_proj.weight": (heads * (nope + value), rank),
        f"{name}.o_proj.weight": (hidden, heads * value),
    }
    if query_rank is None:
        return {f"{name}.q_proj.weight": (heads * (nope + rope), hidden), **shapes}
    shapes[f"{name}.q_a_proj.weight"] = (query_rank, hidden)
    shapes[f"{name}.q_a_layernorm.weight"] = (query_rank,)
    shapes[f"{name}.q_b_proj.weight"] = (heads * (nope + rope), query_rank)
    return shapes


def _mlp_shapes(config: Mapping[str, Any], layer: int, name: str) -> dict[str, tuple[int, ...]]:
    if config.get("model_type", "").startswith("deepseek"):
        return _deepseek_mlp_shapes(config, layer, name)
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    if config.get("model_type") == "phi3":
        inner = config["intermediate_size"]
        return {f"{name}.gate_up_proj.weight": (2 * inner, hidden), f"{name}.down_proj.weight": (hidden, inner)}
    if config.get("model_type") == "gpt_oss":
        return _gpt_oss_shapes(config, name)
    dense = layer in config.get("mlp_only_layers", ()) or (layer + 1) % config.get("decoder_sparse_step", 1)
    if experts == 0 or dense:
        return _gated_shapes(name, hidden, config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {f"{name}.gate.weight": (experts, hidden)}
    inner = config["moe_intermediate_size"]
    if config["model_type"] == "qwen3_5_moe_text":
        shapes[f"{name}.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
        shapes[f"{name}.experts.down_proj"] = (experts, hidden, inner)
    else:
        for index in range(experts):
            shapes |= _gated_shapes(f"{name}.experts.{index}", hidden, inner)
    if "shared_expert_intermediate_size" in config:
        shapes |= _gated_shapes(f"{name}.shared_expert", hidden, config["shared_expert_intermediate_size"])
        shapes[f"{name}.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _deepseek_mlp_shapes(config: Mapping[str, Any], layer: int, name: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    if layer < config["first_k_dense_replace"]:
        return _gated_shapes(name, hidden, config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {f"{name}.gate.weight": (experts, hidden)}
    if config["model_type"] == "deepseek_v3":
        shapes[f"{name}.gate.e_score_correction_bias"] = (experts,)
    for index in range(experts):
        shapes |= _gated_shapes(f"{name}.experts.{index}", hidden, inner)
    return shapes | _gated_shapes(f"{name}.shared_experts", hidden, inner * config["n_shared_experts"])


def _mixtral_shapes(config: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.gate.weight": (experts, hidden)}
    for index in range(experts):
        for matrix, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            shapes[f"{name}.experts.{index}.{matrix}.weight"] = shape
    return shapes


def _gpt_oss_shapes(config: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's router and experts. The weights of experts may be MXFP4 blocks and scales."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.router.weight": (experts, hidden), f"{name}.router.bias": (experts,)}
    for matrix, depth, outputs in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
        stem = f"{name}.experts.{matrix}"
        shapes[f"{stem}_bias"] = (experts, outputs)
        if "quantization_config" in config:
            shapes[f"{stem}_blocks"] = (experts, outputs, depth // MXFP4_GROUP, MXFP4_GROUP // 2)
            shapes[f"{stem}_scales"] = (experts, outputs, depth // MXFP4_GROUP)
        else:
            shapes[stem] = (experts, depth, outputs)
    return shapes


def _gated_shapes(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def tensor_std(name: str, shape: tuple[int, ...], variant: Variant) -> float:
    """Returns the standard deviation of a tensor's random values. The module's docstring explains the choice."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        tied_or_head = variant.config["tie_word_embeddings"] or name == "lm_head.weight"
        return float(variant.logit_scale * shape[1] ** -0.5) if tied_or_head else 0.3
    if name.endswith((".mlp.gate.weight", "moe.gate.weight", ".router.weight")):
        # Router logits are large, so that rounding rarely changes the chosen experts. With a sigmoid they are smaller,
        # because the sigmoid of every large logit is nearly 1.
        # The logits of gpt-oss are larger, because its softmax is over the chosen experts alone.
        spread = 1.5 if variant.config.get("scoring_func") == "sigmoid" else 3.0
        spread = 8.0 if name.endswith("router.weight") else spread
        return float(spread * shape[1] ** -0.5)
    # The router bias is as large as the differences between router scores, so that the bias changes the chosen experts.
    if name.endswith("e_score_correction_bias"):
        return 0.2
    if name.endswith("conv1d.weight"):  # one weight for each token of the convolution
        return 0.6
    if name.endswith(("A_log", "dt_bias")):  # a token's effect on a state halves within about one to thirty tokens
        return 1.0
    if name.endswith("sinks"):  # as large as the largest scores of a query, so that sinks matter
        return 3.0
    if name.endswith((".router.bias", "_proj_bias")):
        return 0.5
    if name.endswith(".bias"):  # small biases, so that the input still decides the outputs
        return 0.4 if name.endswith(("q_proj.bias", "k_proj.bias")) else 0.15
    outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight", ".w2.weight", "experts.down_proj")
    gain = 2.0 if name.endswith(outputs) else 1.2
    if len(shape) == 1:
        return 1.0
    inputs_last = variant.config.get("model_type") == "qwen3_5_moe_text"
    return float(gain * shape[-1 if inputs_last else 1] ** -0.5)


def write_model(variant: Variant, folder: Path) -> None:
    """Writes ``config.json``, the weights (one file, or shards with an index) and a tokenizer of words t0, t1, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", variant.config_json())
    _write_json(folder / "tokenizer.json", _tokenizer(variant.config["vocab_size"]))
    tensors = {}
    for name, shape in tensor_shapes(variant.config).items():
        if name.endswith(("_blocks", "_scales")):
            tensors[name] = _mxfp4(name, shape, variant)
            continue
        tensors[name] = allocate(shape, variant.dtype)
        std = tensor_std(name, shape, variant)
        if variant.config.get("model_type") in HYBRIDS and name.endswith("norm.weight"):
            centre = 1 if "linear_attn" in name else 0  # all other norms multiply by 1 + weight
            tensors[name] = spread_ones(name, shape, variant, centre=centre)
        elif name.endswith("A_log"):
            fill_seeded(name, tensors[name], variant.dtype, seed=variant.seed, std=std)
            tensors[name] = from_float32(to_float32(tensors[name], variant.dtype) - np.float32(2), variant.dtype)
        elif variant.config.get("model_type") == "gemma3_text" and name.endswith("norm.weight"):
            tensors[name] = spread_ones(name, shape, variant, centre=30 if name.endswith(_RESULT_NORMS) else 0)
        elif name.endswith(_SPREAD_NORMS):
            tensors[name] = spread_ones(name, shape, variant)
        else:
            fill_seeded(name, tensors[name], variant.dtype, seed=variant.seed, std=std)
    if variant.num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        _write_shards(folder, tensors, variant)


def _mxfp4(name: str, shape: tuple[int, ...], variant: Variant) -> Array:
    """Returns random bytes of MXFP4 weights, or random scales. A scale is one of three powers of two.

    The scales give the weights about the standard deviation of other layers. Without scales, random 4-bit floats have a
    standard deviation of 2.9.
    """
    count = math.prod(shape)
    generator = np.random.SFC64(list(f"{variant.seed}/{name}".encode()))
    bits: Array = generator.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count].reshape(shape)
    if name.endswith("_blocks"):
        return bits
    gain = 2.0 if "down_proj" in name else 1.2
    middle = round(127 + math.log2(gain * (shape[-1] * MXFP4_GROUP) ** -0.5 / 2.9))
    return middle - 1 + bits % np.uint8(3)


def spread_ones(name: str, shape: tuple[int, ...], variant: Variant, centre: int = 1) -> Array:
    """Returns random weights of a norm, with the mean ``centre``.

    If all weights were 1, tests could not detect a model that ignores them.
    """
    values = allocate(shape, "float32")
    fill_seeded(f"{name}.spread", values, "float32", seed=variant.seed, std=0.3)
    return from_float32(values + np.float32(centre), variant.dtype)


def _write_shards(folder: Path, tensors: Mapping[str, Array], variant: Variant) -> None:
    weight_map = {}
    for shard in range(variant.num_shards):
        file_name = f"model-{shard + 1:05}-of-{variant.num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard :: variant.num_shards])
        write_safetensors(folder / file_name, part)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Returns a ``tokenizer.json`` in which token i is the word ``t<i>`` with a space before it."""
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {"type": "WordLevel", "vocab": {f"▁t{i}": i for i in range(vocab_size)}, "unk_token": "▁t0"},
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Writes arrays as one safetensors file. NumPy has no bfloat16, so a uint16 array holds the bits of bfloat16."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    specs = {}
    for name, array in arrays.items():
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        specs[name] = TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
    serialize_file(specs, path, {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_model(VARIANTS[arguments.variant], arguments.folder)


if __name__ == "__main__":
    main()
