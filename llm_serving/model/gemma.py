"""Converts ``config.json`` of Gemma 3 (Gemma Team, arXiv:2503.19786) to the keys of a Llama, for ``shape.py``."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.formats.typed_fields import TypedFields

_MAX_SCALAR = 1 << 20
"""Largest number by whose square root the scores of attention are divided."""
_MAX_PATTERN = 1024
"""Maximum distance between two layers with global attention."""
_GLOBAL_BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0
"""Default bases of the rotary angles in layers with global attention and in layers with a window."""
_HEAD_DIM = 256
"""Default size of a head."""


@dataclass(frozen=True, slots=True)
class Gemma:
    """The parts of a Gemma that a Llama does not have.

    All norms multiply by 1 + weight. Embeddings are multiplied by the square root of the hidden size. The results of
    attention and of the MLP pass a norm before they are added to the residual stream. The gated activation is GELU in
    its form with tanh.
    """

    local_rope_theta: float
    """Base of the rotary frequencies in layers with a window. ``rope_scaling`` does not apply to these layers."""
    query_scalar: float
    """Scores of attention are divided by the square root of this number (``query_pre_attn_scalar``)."""


def as_llama(fields: TypedFields, num_layers: int) -> TypedFields:
    """Returns Gemma's fields with the keys and defaults of a Llama's ``config.json``.

    The two rotary embeddings of the newer ``rope_parameters`` become ``rope_scaling``, ``rope_theta`` and
    ``rope_local_base_freq``. Raises the error class of ``fields`` for parts that are not supported.
    """
    _refuse_unsupported(fields)
    if "rope_parameters" in fields:
        fields = _with_older_rope(fields)
    defaults = {
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "head_dim": _HEAD_DIM,
        "rope_theta": _GLOBAL_BASE,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
        "hidden_act": fields.text("hidden_activation", "gelu_pytorch_tanh"),
    }
    for key, value in defaults.items():
        fields = fields if key in fields and key != "hidden_act" else fields.with_value(key, value)
    if "layer_types" not in fields:
        each = fields.integer("sliding_window_pattern", 6, 1, _MAX_PATTERN)
        kinds = ["full_attention" if (layer + 1) % each == 0 else "sliding_attention" for layer in range(num_layers)]
        fields = fields.with_value("layer_types", kinds)
    return fields


def read_gemma(fields: TypedFields) -> Gemma:
    """Reads the parts that only a Gemma has, from the fields that ``as_llama`` made."""
    return Gemma(
        local_rope_theta=fields.number("rope_local_base_freq", _LOCAL_BASE, 0.0, 1e12),
        query_scalar=fields.number("query_pre_attn_scalar", float(_HEAD_DIM), 0.0, _MAX_SCALAR),
    )


def _with_older_rope(fields: TypedFields) -> TypedFields:
    rope = fields.mapping("rope_parameters")
    whole, local = rope.mapping("full_attention"), rope.mapping("sliding_attention")
    if local.text("rope_type", "default") != "default":
        raise local.fail("rope_type", "is not supported; only default")
    base = whole.number("rope_theta", _GLOBAL_BASE, 0.0, 1e12)
    local_base = local.number("rope_theta", _LOCAL_BASE, 0.0, 1e12)
    scaling = {key: whole.value(key) for key in whole.keys() if key != "rope_theta"}  # noqa: SIM118 (not a mapping)
    fields = fields.with_value("rope_parameters", None).with_value("rope_scaling", scaling or None)
    return fields.with_value("rope_theta", base).with_value("rope_local_base_freq", local_base)


def _refuse_unsupported(fields: TypedFields) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in fields:
            raise fields.fail(key, "is not supported; Gemma 3 has no soft cap")
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.fail("use_bidirectional_attention", "is not supported; attention is causal")
