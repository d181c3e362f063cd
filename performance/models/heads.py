"""Writes models with seeded random heads: MTP layers in the model's folder, and EAGLE-3 heads in their own folders.

The weights are random as in ``performance.models.folders``. So the guesses of these heads are seldom right, but every
part of a head changes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agent.weights.seeded import fill_seeded
from agent.weights.storage import Array, allocate
from performance.models.folders import HYBRIDS, spread_ones, tensor_shapes, tensor_std, write_model, write_safetensors
from performance.models.variants import FAMILY_VARIANTS, Variant

GUESSED_TOKENS = 160
"""Number of tokens that a seeded EAGLE-3 head can guess."""
SPECULATORS_LAYERS = (1, 4, 8)
"""Numbers of the model's layers whose output a seeded head of ``speculators`` reads. The last one is the model's last
layer.
"""


_HYBRID_LAYERS = "LLFLFLLF"
"""The layers of the hybrid with an EAGLE-3 head: L has linear attention, F has full attention."""


def mtp_variant(name: str = "deepseek_v3") -> Variant:
    """Returns a small model for an MTP layer: the variant ``name`` of DeepSeek-V3, Qwen3-Next or Qwen3.5."""
    found = FAMILY_VARIANTS[name]
    stated = {} if found.config["model_type"] in HYBRIDS else {"num_nextn_predict_layers": 1}
    return replace(found, config={**found.config, **stated}, num_shards=1)


def eagle_variant() -> Variant:
    """Returns a small Qwen3 for an EAGLE-3 head. The head reads the hidden states of three layers. The model has eight
    layers, so that these are three different layers.
    """
    found = FAMILY_VARIANTS["qwen3_tied"]
    return replace(found, config={**found.config, "num_hidden_layers": 8, "tie_word_embeddings": False}, num_shards=1)


def hybrid_eagle_variant() -> Variant:
    """Returns a small Qwen3.5 with eight layers for an EAGLE-3 head."""
    found = FAMILY_VARIANTS["qwen3_5"]
    types = ["full_attention" if kind == "F" else "linear_attention" for kind in _HYBRID_LAYERS]
    changed = {"num_hidden_layers": len(types), "layer_types": types, "tie_word_embeddings": False}
    return replace(found, config={**found.config, **changed})


def write_mtp_model(folder: Path, variant: Variant) -> None:
    """Writes a model with its MTP layer, in the published format of DeepSeek-V3, or of Qwen3-Next and Qwen3.5."""
    write_model(variant, folder)
    config = variant.config
    shapes = _qwen_mtp_shapes(config) if config["model_type"] in HYBRIDS else _deepseek_mtp_shapes(config)
    path = folder / "mtp.safetensors"
    write_safetensors(path, _tensors(shapes, variant))
    files = {"model.safetensors": tensor_shapes(config), path.name: shapes}
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors").rename(folder / "main.safetensors")
    weight_map = {name: file.replace("model.", "main.") for name, file in weight_map.items()}
    index = {"metadata": {"total_size": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}}
    index["weight_map"] = weight_map
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _deepseek_mtp_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of DeepSeek-V3's MTP layer, which has the number after the last layer."""
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    layer = f"model.layers.{count}"
    longer = tensor_shapes({**config, "num_hidden_layers": count + 1})
    shapes = {name: shape for name, shape in longer.items() if name.startswith(f"{layer}.")}
    shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {**shapes, f"{layer}.eh_proj.weight": (hidden, 2 * hidden)}


def _qwen_mtp_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of the MTP layer of Qwen3-Next and Qwen3.5, which has full attention."""
    hidden, theirs = config["hidden_size"], "model.layers.0."
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    layer = {name: shape for name, shape in tensor_shapes({**config, **one}).items() if name.startswith(theirs)}
    shapes = {f"mtp.layers.0.{name.removeprefix(theirs)}": shape for name, shape in layer.items()}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return {**shapes, "mtp.fc.weight": (hidden, 2 * hidden)}


def write_eagle_head(folder: Path, variant: Variant, **sizes: int) -> None:
    """Writes an EAGLE-3 head for the model of ``variant``, in the format of SGLang and SpecForge.

    ``sizes`` are values of ``config.json`` that replace those of ``eagle_config``.
    """
    config = {**eagle_config(variant.config), **sizes}
    _write_head(folder, config, _eagle_shapes(config, "midlayer"), variant)


def write_speculators_head(folder: Path, variant: Variant) -> None:
    """Writes an EAGLE-3 head for the model of ``variant``, in the format of ``speculators``. Its residual stream begins
    with the normalised hidden state.
    """
    config = speculators_config(variant.config)
    shapes = _eagle_shapes({**config["transformer_layer_config"], **config}, "layers.0")
    size = variant.config["vocab_size"], variant.config["hidden_size"]
    _write_head(folder, config, shapes | {"embed_tokens.weight": size}, variant)


def _write_head(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], variant: Variant
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = variant.config["vocab_size"]
    tokens = guessed_tokens({"vocab_size": vocabulary, "draft_vocab_size": config["draft_vocab_size"]})
    is_guessed = np.zeros(vocabulary, np.bool_)
    is_guessed[tokens] = True
    offsets = {"d2t": tokens - np.arange(tokens.size), "t2d": is_guessed}
    write_safetensors(folder / "model.safetensors", _tensors(shapes, variant) | offsets)


def eagle_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config.json`` of an EAGLE-3 head for a model. The sizes of the head's layer differ from the model's."""
    shared = {key: config[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    own = {"num_hidden_layers": 1, "intermediate_size": 96, "draft_vocab_size": GUESSED_TOKENS, "head_dim": 16}
    other = {"rms_norm_eps": 1e-5, "rope_theta": 20000.0, "max_position_embeddings": 128, "hidden_act": "silu"}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **shared, **own, **other}


def speculators_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config.json`` of a head of ``speculators`` for a model, with the sizes of ``eagle_config``."""
    layer = eagle_config(config)
    layer.pop("architectures")
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": list(SPECULATORS_LAYERS),
        "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "model"}},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    }


def guessed_tokens(config: Mapping[str, Any]) -> Array:
    """Returns the tokens that a seeded EAGLE-3 head can guess, ascending, int64."""
    spread = np.linspace(0, config["vocab_size"] - 1, config["draft_vocab_size"])
    tokens: Array = spread.astype(np.int64)
    return tokens


def _eagle_shapes(config: Mapping[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a head's tensors by name. ``layer`` is the name of its layer."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}.self_attn.q_proj.weight": (query, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (key, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (key, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, query),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    return shapes | {f"{layer}.{norm}.weight": (hidden,) for norm in norms} | {"norm.weight": (hidden,)}


def _tensors(shapes: Mapping[str, tuple[int, ...]], variant: Variant) -> dict[str, Array]:
    """Returns random tensors with these shapes. In the MTP layers of Qwen's hybrids, norms multiply by 1 + weight."""
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1 and not name.endswith("bias"):
            tensors[name] = spread_ones(name, shape, variant, centre=0 if name.startswith("mtp.") else 1)
        else:
            tensors[name] = allocate(shape, variant.dtype)
            fill_seeded(name, tensors[name], variant.dtype, seed=variant.seed, std=tensor_std(name, shape, variant))
    return tensors
