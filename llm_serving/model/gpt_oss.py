"""Reads the keys of ``config.json`` in which gpt-oss differs from a Llama (OpenAI, arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any

from llm_serving.formats.typed_fields import TypedFields

ACTIVATION = "clamped_silu"
"""Activation of the experts: SwiGLU with a steeper sigmoid. Gate and up are clamped, and 1 is added to up."""
SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0
"""The factor by which the gate is multiplied in the sigmoid, and the value at which gate and up are clamped."""
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}


def with_defaults(fields: TypedFields, num_layers: int) -> TypedFields:
    """Returns ``fields`` with gpt-oss's defaults for missing keys.

    Without ``layer_types``, every second layer has a window, beginning with the first. Raises the error class of
    ``fields`` if the activation is not that of the published models.
    """
    for key, known in (("swiglu_alpha", SWIGLU_SLOPE), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(key, known, 0.0, 1e6) != known:
            raise fields.fail(key, f"is not supported; only {known}")
    for key, value in _DEFAULTS.items():
        fields = fields if key in fields else fields.with_value(key, value)
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        fields = fields.with_value("rope_scaling", _ROPE)
    if "layer_types" not in fields:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
        fields = fields.with_value("layer_types", kinds)
    return fields
