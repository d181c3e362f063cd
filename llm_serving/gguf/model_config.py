"""Converts the metadata of a GGUF file, of any supported architecture, to the fields of a ``config.json``.

So the code that checks a ``config.json`` also checks GGUF files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_serving.errors import CheckpointError
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.gguf.deepseek2 import deepseek2_fields
from llm_serving.gguf.header import Header, read_header
from llm_serving.gguf.hybrid import HYBRIDS, hybrid_fields, partial_rotary_factor

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with the numbers by which llama.cpp divides the rotary frequencies of Llama 3.1 and later."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Names of the tensors with the divisors of LongRoPE."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3's rotary scaling. A GGUF file has only the divisors that follow from these constants."""
_GEMMA_27B_LAYERS = 62
"""Number of layers of Gemma 3 27B. A file with this number of layers counts as this model.

Unlike the smaller models of Gemma 3, this model divides attention scores by the square root of (hidden size / heads). A
GGUF file does not state this.
"""
_MAX_FACTORS = 4096
"""Maximum number of the factors by which rotary frequencies are divided."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Maps keys of ``config.json`` to keys of a GGUF file. In the keys of the GGUF file, the prefix with the architecture
is left out.
"""
_YARN = {
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _llama(header: Header) -> dict[str, Any]:
    if header.metadata.get("llama.expert_count", 0) == 0:
        return {"architectures": ["LlamaForCausalLM"], "attention_bias": "blk.0.attn_q.bias" in header.tensors}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": header.metadata.get("llama.expert_count"),
        "num_experts_per_tok": header.metadata.get("llama.expert_used_count"),
    }


def _qwen3_experts(header: Header) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": header.metadata.get("qwen3moe.expert_count"),
        "num_experts_per_tok": header.metadata.get("qwen3moe.expert_used_count"),
        "moe_intermediate_size": header.metadata.get("qwen3moe.expert_feed_forward_length"),
        # Llama.cpp always normalises the weights of the chosen experts, and GGUF has no key for it.
        "norm_topk_prob": True,
    }


def _phi3(header: Header) -> dict[str, Any]:
    metadata = header.metadata
    heads, rotated = metadata.get("phi3.attention.head_count"), metadata.get("phi3.rope.dimension_count")
    fields: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": metadata.get("phi3.attention.sliding_window"),
    }
    hidden = metadata.get("phi3.embedding_length")
    if isinstance(rotated, int) and isinstance(heads, int) and isinstance(hidden, int) and 0 < heads <= hidden:
        fields["partial_rotary_factor"] = partial_rotary_factor(rotated, hidden // heads)
    if LONG_FACTORS in header.tensors or SHORT_FACTORS in header.tensors:
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": _stored_factors(header, LONG_FACTORS),
            "short_factor": _stored_factors(header, SHORT_FACTORS),
            "original_max_position_embeddings": metadata.get("phi3.rope.scaling.original_context_length"),
            "attention_factor": metadata.get("phi3.rope.scaling.attn_factor"),
        }
    return fields


def _gemma3(header: Header) -> dict[str, Any]:
    metadata = header.metadata
    layers, hidden, heads = (
        metadata.get(f"gemma3.{key}") for key in ("block_count", "embedding_length", "attention.head_count")
    )
    scalar = metadata.get("gemma3.attention.key_length")
    if layers == _GEMMA_27B_LAYERS and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        scalar = hidden / heads
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": metadata.get("gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": metadata.get("gemma3.rope.freq_base_swa"),
    }


def _gpt_oss(header: Header) -> dict[str, Any]:
    metadata = header.metadata
    fields: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": metadata.get("gpt-oss.expert_feed_forward_length"),
        "num_local_experts": metadata.get("gpt-oss.expert_count"),
        "num_experts_per_tok": metadata.get("gpt-oss.expert_used_count"),
        "sliding_window": metadata.get("gpt-oss.attention.sliding_window"),
    }
    scaling = _rope_scaling(header)
    if scaling is not None:
        # A GGUF file has no key for ``truncate``. All published models have the value False.
        fields["rope_scaling"] = {**scaling, "truncate": False}
    return {key: value for key, value in fields.items() if value is not None}


_ARCHITECTURES: dict[str, Callable[[Header], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": lambda _: {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": lambda _: {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3moe": _qwen3_experts,
    "phi3": _phi3,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "deepseek2": lambda header: deepseek2_fields(header, _rope_scaling(header)),
    **dict.fromkeys(HYBRIDS, hybrid_fields),
}
"""For each architecture (llama.cpp's name), a function that returns its additional fields of ``config.json``.

The name ``llama`` includes Mistral, Mixtral and SmolLM2.
"""


def model_fields(path: Path) -> TypedFields:
    """Returns the fields of ``config.json`` that describe the model of a GGUF file.

    Raises CheckpointError for a damaged file and for an architecture that is not supported.
    """
    header = read_header(path)
    check_architecture(header)
    own = _ARCHITECTURES[header.architecture]
    metadata, prefix = header.metadata, header.architecture
    values: dict[str, Any] = {name: metadata.get(f"{prefix}.{key}") for name, key in _SIZES.items()}
    values["vocab_size"] = _vocabulary_size(header)
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    values["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    values["eos_token_id"] = [token for token in ends if token is not None]
    values["rope_scaling"] = _rope_scaling(header)
    fields = {key: value for key, value in {**values, **own(header)}.items() if value is not None}
    return TypedFields(str(path), fields, CheckpointError)


def check_architecture(header: Header) -> None:
    """Raises CheckpointError unless the model's architecture is supported."""
    if header.architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: general.architecture = {header.architecture!r}: is not supported; only "
            f"{', '.join(_ARCHITECTURES)}"
        )


def _vocabulary_size(header: Header) -> int | None:
    """Returns the number of rows of the embedding, or None if the file has no embedding.

    The list of tokens may be shorter, because some models pad the embedding.
    """
    embedding = header.tensors.get("token_embd.weight")
    return None if embedding is None else embedding.shape[0]


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    """Returns ``rope_scaling`` of ``config.json``, or None if angles are not scaled."""
    metadata, prefix = header.metadata, f"{header.architecture}.rope"
    if ROPE_FACTORS in header.tensors:
        return _llama3_scaling(header)
    kind = metadata.get(f"{prefix}.scaling.type")
    factor = metadata.get(f"{prefix}.scaling.factor", metadata.get(f"{prefix}.scale_linear"))
    if kind in (None, "none") and factor in (None, 0.0, 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": factor}
    if kind == "yarn":
        found = {name: metadata.get(f"{prefix}.scaling.{key}") for name, key in _YARN.items()}
        scaling.update({name: value for name, value in found.items() if value is not None})
    return scaling


def _llama3_scaling(header: Header) -> dict[str, Any]:
    """Returns the fields of a Llama 3 ``rope_scaling`` that gives exactly the divisors in the file's tensor.

    The tensor has one divisor for each rotary frequency. Raises CheckpointError if no Llama 3 scaling gives these
    divisors.
    """
    stored = _stored_factors(header, ROPE_FACTORS)
    theta = header.metadata.get(f"{header.architecture}.rope.freq_base", 10_000.0)
    scaling = {"rope_type": "llama3", "factor": max(1.0, *stored), **_LLAMA3}
    expected = _llama3_factors(len(stored), float(theta), scaling)
    if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(stored, expected, strict=True)):
        raise CheckpointError(
            f"{header.path}: tensor {ROPE_FACTORS} does not have the factors of Llama 3.1's rotary scaling with "
            f"factor {scaling['factor']:g}; other scalings are not supported"
        )
    return scaling


def _stored_factors(header: Header, name: str) -> list[float]:
    """Returns the values of a tensor with divisors. Raises CheckpointError if the tensor is missing, or if it is not a
    float32 vector with at most ``_MAX_FACTORS`` values.
    """
    entry = header.tensors.get(name)
    if entry is None:
        raise CheckpointError(f"{header.path}: tensor {name} is missing; the file has only the other factors")
    if entry.type.name != "F32" or len(entry.shape) != 1:
        raise CheckpointError(f"{header.path}: tensor {name} is {entry.type.name} {list(entry.shape)}; not F32")
    if entry.size > _MAX_FACTORS * 4:
        raise CheckpointError(f"{header.path}: tensor {name} has {entry.shape[0]} values; at most {_MAX_FACTORS}")
    with header.path.open("rb") as file:
        file.seek(entry.begin)
        return list(struct.unpack(f"<{entry.shape[0]}f", file.read(entry.size)))


def _llama3_factors(count: int, theta: float, scaling: Mapping[str, Any]) -> Iterator[float]:
    """Yields the divisors of ``count`` rotary frequencies by the formula of Llama 3.1 (``llama3`` in transformers)."""
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        smooth = min(max((context / wavelength - low) / (high - low), 0.0), 1.0)
        yield 1 / ((1 - smooth) / factor + smooth)
