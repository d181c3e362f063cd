"""Converts the metadata of Qwen's hybrids (``qwen3next``, ``qwen35``, ``qwen35moe``) to fields of ``config.json``.

Source: ``conversion/qwen.py`` of https://github.com/ggml-org/llama.cpp. The files use the keys of state space models
(``ssm``) for the sizes of Gated DeltaNet.
"""

from __future__ import annotations

from typing import Any

from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import Header
from llm_serving.model.gated_delta import MAX_DELTA_DIM, MAX_DELTA_HEADS, MAX_TAPS, GatedDelta

QWEN3_NEXT, QWEN35, QWEN35_MOE = "qwen3next", "qwen35", "qwen35moe"
HYBRIDS = (QWEN3_NEXT, QWEN35, QWEN35_MOE)
"""llama.cpp's names of the hybrids: architectures with layers of linear attention and layers of full attention."""
TILED = (QWEN35, QWEN35_MOE)
"""The architectures whose GGUF files have another order of value heads than the publisher's checkpoint.

In the checkpoint, the value heads that use the same key head are neighbours. In these GGUF files, neighbouring value
heads use different key heads.
"""
_DEFAULT_INTERVAL = 4
"""If the file states no interval, one in every ``_DEFAULT_INTERVAL`` layers has full attention."""


def delta_sizes(header: Header) -> GatedDelta:
    """Returns the sizes of the layers with linear attention. Leaves the field ``full_layers`` (the numbers of the
    layers with full attention) empty.

    Raises CheckpointError if a size is missing or wrong.
    """
    value_heads = _integer(header, "ssm.time_step_rank", MAX_DELTA_HEADS)
    values = _integer(header, "ssm.inner_size", value_heads * MAX_DELTA_DIM)
    if values % value_heads:
        key = f"{header.architecture}.ssm.inner_size"
        raise CheckpointError(f"{header.path}: {key} = {values}: must be a multiple of the {value_heads} value heads")
    key_heads = _integer(header, "ssm.group_count", MAX_DELTA_HEADS)
    if value_heads % key_heads:
        key = f"{header.architecture}.ssm.time_step_rank"
        raise CheckpointError(f"{header.path}: {key} = {value_heads}: must be a multiple of the {key_heads} key heads")
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=_integer(header, "ssm.state_size", MAX_DELTA_DIM),
        value_dim=values // value_heads,
        taps=_integer(header, "ssm.conv_kernel", MAX_TAPS),
        full_layers=(),
    )


def num_model_layers(header: Header) -> int | None:
    """Returns the number of layers, without the layers for multi-token prediction. None if the file does not state it.
    """
    layers = header.metadata.get(f"{header.architecture}.block_count")
    extra = header.metadata.get(f"{header.architecture}.nextn_predict_layers", 0)
    return layers - extra if isinstance(layers, int) and isinstance(extra, int) else None


def hybrid_fields(header: Header) -> dict[str, Any]:
    """Returns the fields of ``config.json`` that only hybrids have. Raises CheckpointError for a wrong value."""
    sizes, metadata, prefix = delta_sizes(header), header.metadata, header.architecture
    fields: dict[str, Any] = {
        "num_hidden_layers": num_model_layers(header),
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.taps,
        "full_attention_interval": metadata.get(f"{prefix}.full_attention_interval", _DEFAULT_INTERVAL),
        "layer_types": _layer_types(header),
        "partial_rotary_factor": partial_rotary_factor(
            metadata.get(f"{prefix}.rope.dimension_count"), metadata.get(f"{prefix}.attention.key_length")
        ),
    }
    if prefix == QWEN35:
        return {"architectures": ["Qwen3_5ForCausalLM"], **fields}
    return {
        "architectures": ["Qwen3NextForCausalLM" if prefix == QWEN3_NEXT else "Qwen3_5MoeForCausalLM"],
        "num_experts": metadata.get(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.get(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.get(f"{prefix}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.get(f"{prefix}.expert_shared_feed_forward_length"),
        # As for qwen3moe, llama.cpp always normalises the weights of the chosen experts.
        "norm_topk_prob": True,
        **fields,
    }


def partial_rotary_factor(rotated: object, head_dim: object) -> float | None:
    """Returns the fraction of a head's elements that rotary embedding rotates, or None if a number is missing.

    ``rotated`` is the number of rotated elements, and ``head_dim`` the number of all elements. This function does not
    check the fraction. The reader of ``config.json`` refuses a wrong one.
    """
    if not isinstance(rotated, int) or not isinstance(head_dim, int) or head_dim < 1:
        return None
    # The reader of ``config.json`` rounds fraction x head_dim down. The added half ensures that the result is
    # ``rotated``.
    return 1.0 if rotated == head_dim else (rotated + 0.5) / head_dim


def _layer_types(header: Header) -> list[str] | None:
    """Returns the kind of each layer if the file states the kinds one by one, else None."""
    flags = header.metadata.get(f"{header.architecture}.attention.recurrent_layers")
    if not isinstance(flags, list):
        return None
    return ["linear_attention" if flag else "full_attention" for flag in flags[: num_model_layers(header)]]


def _integer(header: Header, key: str, largest: int) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}")
    if not isinstance(value, int) or not 1 <= value <= largest:
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} = {value!r}: must be from 1 to {largest}")
    return value
