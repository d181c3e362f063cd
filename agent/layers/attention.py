"""Self-attention over the paged KV cache."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.linear import Linear
from agent.layers.parameter import unbound_parameter
from llm_serving.model_shape import ModelShape


class Attention(nn.Cell):
    """Grouped-query attention (Ainslie et al. 2023); owns its layer's parameters of the KV cache.

    ``key_cache`` and ``value_cache`` are [num_blocks, block_size, key-value heads, head_dim]; ``agent.kv_cache``
    gives them their memory.
    """

    def __init__(self, ops: OpTable, shape: ModelShape, num_blocks: int, block_size: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.qkv = Linear(ops, shape.hidden_size, (heads + 2 * kv_heads) * head_dim)
        self.output = Linear(ops, heads * head_dim, shape.hidden_size)
        cache_shape = (num_blocks, block_size, kv_heads, head_dim)
        self.key_cache = unbound_parameter(cache_shape, ops.dtype)
        self.value_cache = unbound_parameter(cache_shape, ops.dtype)
        self.attention = ops.attention(heads, kv_heads, head_dim)

    def construct(self, x: Tensor, rotary: tuple[Tensor, ...], step: tuple[Tensor, ...], whole_prompts: bool) -> Tensor:
        """x [T, hidden_size] -> the same shape. ``rotary``, ``step``, ``whole_prompts``: see ``OpTable.attention``."""
        attended = self.attention(self.qkv(x), rotary, self.key_cache, self.value_cache, step, whole_prompts)
        return self.output(attended)
