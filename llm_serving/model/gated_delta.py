"""Sizes of Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), and the keys of ``config.json`` of Qwen's hybrids.

Qwen3-Next and Qwen3.5 are hybrids: most layers have Gated DeltaNet, a linear attention whose state does not grow with
the sequence. The other layers have full attention with an output gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llm_serving.formats.typed_fields import TypedFields

MAX_DELTA_HEADS = 1024
"""Maximum number of heads of a layer with linear attention."""
MAX_DELTA_DIM = 512
"""Maximum size of a head of linear attention."""
MAX_TAPS = 16
"""Maximum number of tokens that the convolution of linear attention reads."""
_LANES = 16
"""Number of elements of a head that the kernels compute together."""
_FULL, _LINEAR = "full_attention", "linear_attention"
_DEFAULTS: dict[str, Any] = {"partial_rotary_factor": 0.25, "max_position_embeddings": 32_768, "norm_topk_prob": True}


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The sizes of the Gated DeltaNet layers, and the layers that have full attention instead."""

    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``: consecutive value heads share a key head."""
    key_dim: int
    value_dim: int
    """``key_dim`` and ``value_dim`` are the sizes of a key head and of a value head."""
    taps: int
    """Number of tokens that the causal convolution of queries, keys and values reads, the present one included."""
    full_layers: tuple[int, ...]
    """Indices of the layers with full attention."""

    @property
    def keys(self) -> int:
        """Total number of elements of all key heads. The query heads together have the same number of elements."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Total number of elements of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: the elements of all query, key and value heads."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Number of outputs of the first linear layer: the channels of the convolution, an output gate, and two values
        of each value head.

        The two values are b, from which beta is computed, and a, from which the decay is computed.
        """
        return self.channels + self.values + 2 * self.value_heads

    def state_floats(self, max_logged: int) -> int:
        """Returns the number of float32 values in a sequence's state of one layer.

        These values are a matrix for each value head, the inputs of the convolution from the last ``taps`` - 1 tokens,
        and a log. The log has the inputs and gates of ``max_logged`` drafts, so that wrong drafts can be undone.
        """
        log = max_logged * (self.channels + 2 * self.value_heads)
        return self.value_heads * self.key_dim * self.value_dim + (self.taps - 1) * self.channels + log

    def part(self, key_heads: int, layers: range) -> GatedDelta:
        """Returns the sizes of ``key_heads`` key heads with their value heads, in consecutive ``layers``.

        In the result, the first of these layers has index 0.
        """
        return replace(
            self,
            key_heads=key_heads,
            value_heads=key_heads * (self.value_heads // self.key_heads),
            full_layers=tuple(layer - layers.start for layer in self.full_layers if layer in layers),
        )

    @property
    def num_other_parameters(self) -> int:
        """Number of parameters of a Gated DeltaNet layer outside its linear layers: those of the convolution, the decay
        rates and the norm.
        """
        return self.channels * self.taps + 2 * self.value_heads + self.value_dim


def with_delta_defaults(fields: TypedFields) -> TypedFields:
    """Returns ``fields`` with the defaults of Qwen's hybrids for missing keys.

    Raises the error class of ``fields`` if attention has biases.
    """
    if fields.boolean("attention_bias", False):
        raise fields.fail("attention_bias", "is not supported with an output gate; attention has no biases")
    for key, value in _DEFAULTS.items():
        in_rope = key == "partial_rotary_factor" and key in fields.mapping("rope_parameters")
        fields = fields if key in fields or in_rope else fields.with_value(key, value)
    return fields


def read_gated_delta(fields: TypedFields, num_layers: int) -> GatedDelta:
    """Returns the sizes of the Gated DeltaNet layers. Raises the error class of ``fields`` for a wrong value."""
    heads = fields.integer("linear_num_key_heads", 16, 1, MAX_DELTA_HEADS)
    value_heads = fields.integer("linear_num_value_heads", 32, 1, MAX_DELTA_HEADS)
    if value_heads % heads:
        raise fields.fail("linear_num_value_heads", f"must be a multiple of linear_num_key_heads = {heads}")
    sizes = {}
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        sizes[key] = fields.integer(key, 128, 1, MAX_DELTA_DIM)
        if sizes[key] % _LANES:
            raise fields.fail(key, f"must be a multiple of {_LANES}")
    return GatedDelta(
        key_heads=heads,
        value_heads=value_heads,
        key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"],
        taps=fields.integer("linear_conv_kernel_dim", 4, 1, MAX_TAPS),
        full_layers=_full_layers(fields, num_layers),
    )


def _full_layers(fields: TypedFields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers with full attention: those that ``layer_types`` names, or every fourth one."""
    types = fields.names("layer_types")
    if not types:
        each = fields.integer("full_attention_interval", 4, 1, 1 << 20)
        types = tuple(_LINEAR if (layer + 1) % each else _FULL for layer in range(num_layers))
    if len(types) != num_layers or not set(types) <= {_FULL, _LINEAR}:
        raise fields.fail("layer_types", f"must be a list of {num_layers} entries, each {_FULL} or {_LINEAR}")
    full = tuple(layer for layer, kind in enumerate(types) if kind == _FULL)
    if not full or len(full) == num_layers:
        raise fields.fail("layer_types", f"must have layers of both kinds, {_FULL} and {_LINEAR}")
    return full
