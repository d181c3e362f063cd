"""Self-attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import replace

from mindspore import Tensor, nn

from agent.backends.base import AttentionForm, OpTable
from agent.layers.linear import NormLinear, NormWeight, RowParallelLinear
from agent.layers.parameter import unbound_parameter
from llm_serving.model.shape import ModelShape


class Attention(nn.Cell):
    """Grouped-query attention (Ainslie et al. 2023) of one layer, with the norm before it.

    Some models add biases, norms of queries and keys, sinks, a sliding window, or a gate of the result. The KV cache of
    the layer consists of two parameters, or three with a cache of scales. The op table decides their layouts, and
    ``agent/kv_cache.py`` allocates their memory.
    """

    def __init__(self, ops: OpTable, shape: ModelShape, num_blocks: int, block_size: int, *, layer: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        qkv_width = (heads + 2 * kv_heads) * head_dim
        self.qkv = NormLinear(
            ops,
            shape.hidden_size,
            qkv_width,
            shape.rms_norm_eps,
            first=layer == 0,
            biased=shape.attention_bias,
            num_layers=3,
        )
        self.output = RowParallelLinear(ops, heads * head_dim, shape.hidden_size, biased=shape.output_bias)
        cache_shape, cache_dtype = ops.cache_layout(num_blocks, block_size, kv_heads, head_dim)
        self.key_cache = unbound_parameter(cache_shape, cache_dtype)
        self.value_cache = unbound_parameter(cache_shape, cache_dtype)
        scale_layout = ops.scale_layout(num_blocks, block_size, kv_heads)
        self.has_scales = scale_layout is not None
        if scale_layout is not None:
            self.scale_cache = unbound_parameter(*scale_layout)
        self.attention = ops.attention(replace(attention_form(shape, layer), block_size=block_size))
        self.has_norms = shape.query_key_norm
        if self.has_norms:
            self.query_norm = NormWeight(ops, head_dim, shape.norm_dtype)
            self.key_norm = NormWeight(ops, head_dim, shape.norm_dtype)
        self.has_gate = shape.gated_attention
        if self.has_gate:
            # ``qkv`` has already computed hidden + residual. The gate takes this sum as its input, so the gate must not
            # add the residual again.
            self.gate = NormLinear(ops, shape.hidden_size, heads * head_dim, shape.rms_norm_eps, first=True)
            self.sigmoid_gate = ops.sigmoid_gate(heads * head_dim)
        self.has_sinks = shape.sinks
        if self.has_sinks:
            self.sinks = unbound_parameter((heads,), "float32")

    def of_heads(self) -> tuple[Tensor, ...]:
        """Returns the weights of the norms of queries and keys, or the sinks of the query heads.

        Returns () if the model has neither.
        """
        if self.has_sinks:
            return (self.sinks,)
        return (self.query_norm.weight, self.key_norm.weight) if self.has_norms else ()

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        rotary: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns attention of RMSNorm(hidden + residual), and hidden + residual, both [tokens, hidden_size].

        ``gamma`` [hidden_size] is the norm's weight. ``OpTable`` describes ``rotary``, ``step`` and ``whole_prompts``.
        """
        qkv, residual = self.qkv(hidden, residual, gamma, step)
        caches: tuple[Tensor, ...] = (self.key_cache, self.value_cache)
        if self.has_scales:
            caches = (*caches, self.scale_cache)
        attended = self.attention(qkv, self.of_heads(), rotary, caches, step, whole_prompts)
        if self.has_gate:
            gates, residual = self.gate(residual, residual, gamma, step)
            attended = self.sigmoid_gate(attended, gates, step)
        return self.output(attended, step), residual


def attention_form(shape: ModelShape, layer: int) -> AttentionForm:
    """Returns what the op table must know to make the attention operator of one layer: numbers of heads, head size,
    window, norms and sinks."""
    return AttentionForm(
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        window=shape.window_of(layer),
        norm_epsilon=shape.rms_norm_eps if shape.query_key_norm else None,
        sinks=shape.sinks,
    )
