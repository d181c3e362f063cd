"""Models with heads for tests: seeded ones, whose guesses are seldom right, and counting ones, which are always right.

A counting model's next token is its last token plus ``STEP``. All layers give zeros, and the rows of the embedding are
nearly orthogonal. The output layer has the same rows in another order. A head can copy this rule from the embedding of
its token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import deserialize
from safetensors.numpy import load_file, save_file

from agent.weights.storage import to_float32
from performance.models.folders import write_model
from performance.models.heads import (
    eagle_config,
    eagle_variant,
    hybrid_eagle_variant,
    mtp_variant,
    write_eagle_head,
    write_mtp_model,
    write_speculators_head,
)
from support.small_configs import TINY_LLAMA, write_json

Floats = npt.NDArray[np.float32]
STEP = 7
MTP = {
    "mtp": "deepseek_v3",
    "mtp_qwen3_next": "qwen3_next",
    "mtp_qwen3_5": "qwen3_5",
    "mtp_qwen3_5_moe": "qwen3_5_moe",
}
"""The kinds of models with MTP layers, and the variants of these models."""
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
"""Endings of the names of the last linear layers of attention and of MLPs."""
_SHARP = 100.0
"""The size of queries and keys. With this size, a token attends only to itself."""


def write_heads(method: str, folder: Path, *, counting: bool = False) -> tuple[Path, Path | None]:
    """Writes a model and its head. Returns both folders; an MTP layer is in the model's folder.

    ``method`` is the kind of the head: a key of ``MTP``, or ``eagle``. ``speculators`` is an EAGLE-3 head in the format
    of ``speculators``. ``eagle_hybrid`` is one for a model with linear attention.
    """
    model, head = folder / "model", folder / "head"
    variant = eagle_variant()
    if method in MTP:
        variant = mtp_variant(MTP[method])
    elif method == "eagle_hybrid":
        variant = hybrid_eagle_variant()
    if counting:
        variant = replace(variant, dtype="float32", config={**variant.config, "tie_word_embeddings": False})
    if method in MTP:
        write_mtp_model(model, variant)
        if counting:
            _make_mtp_count(model)
        return model, None
    write_model(variant, model)
    (write_speculators_head if method == "speculators" else write_eagle_head)(head, variant)
    if counting:
        embedding, output = _make_count(model / "model.safetensors")
        write_copying_head(head, model, embedding, output)
    return model, head


def add_tokenizer(folder: Path) -> None:
    """Gives a model the tokenizer of the tiny model, so that a server can use texts of its first tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TINY_LLAMA / name, folder / name)


def tiny_llama_embedding() -> Floats:
    """Returns the embedding of the tiny model, which is also its output layer, float32 [vocabulary, hidden_size]."""
    for name, tensor in deserialize((TINY_LLAMA / "model.safetensors").read_bytes()):
        if name == "model.embed_tokens.weight":
            bits = np.frombuffer(tensor["data"], np.uint16).reshape(tensor["shape"])
            return to_float32(bits, "bfloat16")
    raise AssertionError("the tiny model has an embedding")


def write_copying_head(folder: Path, model: Path, embedding: Floats, output: Floats) -> None:
    """Writes an EAGLE-3 head whose state is the embedding of its token, before the output layer ``output``.

    ``embedding`` and ``output`` are [vocabulary, hidden_size]. The attention of the head sees only the token itself.
    Queries and keys are equal for all tokens, and their rotation makes every other position score less. The values are
    the embedding without the state, so that their sum with the state is the embedding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab, hidden = embedding.shape
    stated = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = hidden // 16
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 16, "attention_bias": True}
    config = eagle_config(stated) | {"draft_vocab_size": vocab, **sizes}
    write_json(folder / "config.json", config)
    eye, zeros, ones = np.eye(hidden, dtype=np.float32), np.zeros((hidden, hidden), np.float32), np.ones(hidden)
    inner = np.zeros((config["intermediate_size"], hidden), np.float32)
    layer = "midlayer.self_attn"
    tensors: dict[str, npt.NDArray[np.generic]] = {
        "fc.weight": np.concatenate([zeros, zeros, eye], axis=1),
        f"{layer}.v_proj.weight": np.concatenate([eye, -eye], axis=1),
        f"{layer}.v_proj.bias": np.zeros(hidden),
        f"{layer}.o_proj.weight": eye,
        f"{layer}.o_proj.bias": np.zeros(hidden),
        "midlayer.mlp.gate_proj.weight": inner,
        "midlayer.mlp.up_proj.weight": inner,
        "midlayer.mlp.down_proj.weight": inner.T,
        "lm_head.weight": output,
        "norm.weight": ones,
    }
    for name in ("q_proj", "k_proj"):
        tensors |= {f"{layer}.{name}.weight": np.zeros((hidden, 2 * hidden)), f"{layer}.{name}.bias": _SHARP * ones}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = ones
    floats = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(
        floats | {"d2t": np.zeros(vocab, np.int64), "t2d": np.ones(vocab, np.bool_)}, folder / "model.safetensors"
    )


def _make_count(path: Path) -> tuple[Floats, Floats]:
    """Turns the model in a safetensors file into a counting model. Returns its embedding and its output layer."""
    tensors = load_file(path)
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    embedding = np.random.default_rng(3).standard_normal((vocab, hidden)).astype(np.float32)
    embedding *= hidden**0.5 / np.linalg.norm(embedding, axis=1, keepdims=True)  # as long as normalised states
    output = np.roll(embedding, STEP, axis=0)
    adds_one = any("linear_attn" in name for name in tensors)  # norms of Qwen's hybrids multiply by 1 + weight
    norm = np.full(hidden, 0 if adds_one else 1, np.float32)
    for name in tensors:
        if name.endswith(_OUTPUTS):
            tensors[name] = np.zeros_like(tensors[name])
    tensors |= {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
    save_file(tensors | {"lm_head.weight": output}, path)
    return embedding, output


def _make_mtp_count(folder: Path) -> None:
    _make_count(folder / "main.safetensors")
    path = folder / "mtp.safetensors"
    tensors: Mapping[str, Floats] = load_file(path)
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_OUTPUTS):
            changed[name] = np.zeros_like(tensor)
        elif name.endswith(("enorm.weight", "shared_head.norm.weight")):
            changed[name] = np.ones_like(tensor)
        elif name in ("mtp.pre_fc_norm_embedding.weight", "mtp.norm.weight"):
            changed[name] = np.zeros_like(tensor)
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            hidden = tensor.shape[0]
            changed[name] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1).astype(np.float32)
    save_file(changed, path)
