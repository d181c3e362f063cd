"""Self-attention over the paged KV cache."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import AttentionForm, OpTable
from agent.layers.linear import NormLinear, RowParallelLinear
from agent.layers.norm import NormWeight
from agent.layers.parameter import unbound_parameter
from llm_serving.model.shape import ModelShape


class Attention(nn.Cell):
    """Grouped-query attention (Ainslie et al. 2023) of the normalised residual stream.

    Depending on the model, it has biases, norms of queries and keys, and a sliding window. Owns its layer's parameters
    of the KV cache. The op table decides their layout, and ``agent.kv_cache`` allocates their memory.
    """

    def __init__(self, ops: OpTable, shape: ModelShape, num_blocks: int, block_size: int, *, layer: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        qkv_width = (heads + 2 * kv_heads) * head_dim
        self.qkv = NormLinear(
            ops, shape.hidden_size, qkv_width, shape.rms_norm_eps, first=layer == 0, biased=shape.attention_bias
        )
        self.output = RowParallelLinear(ops, heads * head_dim, shape.hidden_size, biased=shape.output_bias)
        cache_shape, cache_dtype = ops.cache_layout(num_blocks, block_size, kv_heads, head_dim)
        self.key_cache = unbound_parameter(cache_shape, cache_dtype)
        self.value_cache = unbound_parameter(cache_shape, cache_dtype)
        self.attention = ops.attention(attention_form(shape, layer))
        self.has_norms = shape.query_key_norm
        if self.has_norms:
            self.query_norm = NormWeight(ops, head_dim)
            self.key_norm = NormWeight(ops, head_dim)

    def norms(self) -> tuple[Tensor, ...]:
        """Returns the weights of the norms of queries and keys, or () if the model has none."""
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
        """hidden, residual [T, hidden_size], gamma [hidden_size] -> attention of the normalised sum, and the sum.

        ``OpTable`` describes ``rotary``, ``step`` and ``whole_prompts``.
        """
        qkv, residual = self.qkv(hidden, residual, gamma, step)
        caches = (self.key_cache, self.value_cache)
        attended = self.attention(qkv, self.norms(), rotary, caches, step, whole_prompts)
        return self.output(attended, step), residual


def attention_form(shape: ModelShape, layer: int) -> AttentionForm:
    """Returns the properties of one layer's attention."""
    return AttentionForm(
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        window=shape.window_of(layer),
        norm_epsilon=shape.rms_norm_eps if shape.query_key_norm else None,
    )
