"""Self-attention over the paged KV cache."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.linear import Linear, NormLinear
from agent.layers.parameter import unbound_parameter
from llm_serving.model_shape import ModelShape


class Attention(nn.Cell):
    """Grouped-query attention (Ainslie et al. 2023) of the normalised residual stream.

    Owns its layer's parameters of the KV cache, laid out as the op table says; ``agent.kv_cache`` gives them memory.
    """

    def __init__(self, ops: OpTable, shape: ModelShape, num_blocks: int, block_size: int, *, first: bool) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        qkv_width = (heads + 2 * kv_heads) * head_dim
        self.qkv = NormLinear(ops, shape.hidden_size, qkv_width, shape.rms_norm_eps, first=first)
        self.output = Linear(ops, heads * head_dim, shape.hidden_size)
        cache_shape, cache_dtype = ops.cache_layout(num_blocks, block_size, kv_heads, head_dim)
        self.key_cache = unbound_parameter(cache_shape, cache_dtype)
        self.value_cache = unbound_parameter(cache_shape, cache_dtype)
        self.attention = ops.attention(heads, kv_heads, head_dim)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        rotary: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual [T, hidden_size], gamma [hidden_size] -> attention of the normalised sum, the sum.

        ``rotary``, ``step``, ``whole_prompts``: see ``OpTable``.
        """
        qkv, residual = self.qkv(hidden, residual, gamma, step)
        attended = self.attention(qkv, rotary, self.key_cache, self.value_cache, step, whole_prompts)
        return self.output(attended, step), residual
