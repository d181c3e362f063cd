"""Converts the metadata of DeepSeek's GGUF files (architecture ``deepseek2``) to the fields of a ``config.json``.

Source: ``conversion/deepseek.py`` and ``src/models/deepseek2.cpp`` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import Header

_PREFIX = "deepseek2."
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers for the functions with which an expert router computes scores from logits."""
_GATING_FUNCTION = "expert_gating_func"
_TEMPERATURE = "attention.temperature_scale"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_DECIMALS = 6
"""Number of decimals to which ``mscale_all_dim`` is rounded. A GGUF file stores ``mscale_all_dim`` / 10 as a float32.
After the multiplication by 10, rounding gives the exact value of the publisher's ``config.json``.
"""


def deepseek2_fields(header: Header, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of ``config.json`` that only DeepSeek V2 and V3 have. ``scaling`` is ``rope_scaling``.

    The expert router turns logits into scores by a sigmoid in V3, and by a softmax in V2. Raises CheckpointError for
    another function, and for a temperature of attention scores (Mistral Large 3).
    """
    get = _values(header)
    gating = get.get(_GATING_FUNCTION, _SOFTMAX)
    if gating not in (0, _SOFTMAX, _SIGMOID):
        problem = f"must be {_SOFTMAX} (softmax) or {_SIGMOID} (sigmoid)"
        raise CheckpointError(f"{header.path}: {_PREFIX}{_GATING_FUNCTION} = {gating!r}: {problem}")
    if get.get(_TEMPERATURE):
        problem = "is not supported; attention scores have no temperature"
        raise CheckpointError(f"{header.path}: {_PREFIX}{_TEMPERATURE} = {get[_TEMPERATURE]!r}: {problem}")
    is_v3 = gating == _SIGMOID
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": get.get("attention.head_count"),
        "head_dim": None,
        "q_lora_rank": get.get("attention.q_lora_rank"),
        "kv_lora_rank": get.get("attention.kv_lora_rank"),
        **_head_sizes(get),
        **_experts(get, is_v3=is_v3),
        "rope_scaling": _with_score_factor(get, scaling),
    }


def _values(header: Header) -> dict[str, Any]:
    return {key.removeprefix(_PREFIX): value for key, value in header.metadata.items() if key.startswith(_PREFIX)}


def _head_sizes(get: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes of an attention head.

    Newer files state these sizes under keys with the suffix ``_mla``. In these files, the keys without the suffix are
    the sizes of the latent vectors in the KV cache.
    """
    key, rotated = get.get("attention.key_length_mla", get.get("attention.key_length")), get.get("rope.dimension_count")
    return {
        "qk_nope_head_dim": key - rotated if isinstance(key, int) and isinstance(rotated, int) else None,
        "qk_rope_head_dim": rotated,
        "v_head_dim": get.get("attention.value_length_mla", get.get("attention.value_length")),
    }


def _experts(get: dict[str, Any], *, is_v3: bool) -> dict[str, Any]:
    """Returns the fields about experts.

    Older files do not state groups of experts. Then all experts are in one group, as in llama.cpp.
    """
    groups = get.get("expert_group_count") or 1
    method = "group_limited_greedy" if groups != 1 else "greedy"
    return {
        "moe_intermediate_size": get.get("expert_feed_forward_length"),
        "n_routed_experts": get.get("expert_count"),
        "num_experts_per_tok": get.get("expert_used_count"),
        "n_shared_experts": get.get("expert_shared_count"),
        "first_k_dense_replace": get.get("leading_dense_block_count"),
        "routed_scaling_factor": get.get("expert_weights_scale") or None,
        "norm_topk_prob": get.get("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": get.get("expert_group_used_count") or 1,
        "topk_method": "noaux_tc" if is_v3 else method,
        "scoring_func": "sigmoid" if is_v3 else "softmax",
    }


def _with_score_factor(get: dict[str, Any], scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns DeepSeek's ``rope_scaling``, in which YaRN scales the attention scores instead of the cosines and sines.

    ``scaling`` is the mapping without the keys ``mscale`` and ``mscale_all_dim``. It is returned unchanged if it is
    None or not YaRN. A GGUF file states only ``mscale_all_dim``. ``mscale`` gets the same value, as in the published
    models.
    """
    if scaling is None or scaling["rope_type"] != "yarn":
        return scaling
    multiplier = get.get(_LOG_MULTIPLIER)
    if not isinstance(multiplier, float):
        return {**scaling, "attention_factor": 1.0}
    factor = round(10 * multiplier, _DECIMALS)
    return {**scaling, "mscale": factor, "mscale_all_dim": factor}
